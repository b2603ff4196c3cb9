"""The page of promises is up to date: each has tests that exist, or a reason why nothing is promised."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from tests.faults.faults import FAULTS

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "reliability.py"))
ROWS = SCRIPT["ROWS"]
NUMBERS = {"R": 20, "M": 8, "I": 3, "P": 2}

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def test_the_page_is_up_to_date():
    text = SCRIPT["PAGE"].read_text()
    assert text == SCRIPT["page"](text), "run make map"


def test_every_promise_has_its_row():
    assert [row.id for row in ROWS] == [f"{letter}{i + 1}" for letter, n in NUMBERS.items() for i in range(n)]
    assert list(NUMBERS) == list(SCRIPT["SECTIONS"])


@every_row
def test_a_row_has_tests_and_a_bound_or_a_reason(row):
    assert (row.tests and row.bound) or row.reason
    assert row.promise.endswith(".")
    assert not row.reason or row.reason.endswith(".")


@cache
def functions(path):
    """Functions at the top level of a file, with the names of their marks."""
    return {
        node.name: {ast.unparse(mark) for mark in node.decorator_list}
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


@every_row
def test_the_tests_of_a_row_exist_and_may_fail(row):
    for test in row.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), path
        if name:
            assert name in functions(path), f"{path} has no {name}"
            assert not [mark for mark in functions(path)[name] if re.search(r"mark\.(xfail|skip)\b", mark)]


def test_every_fault_of_the_suite_shows_a_promise():
    assert {name for row in ROWS for name in row.faults} == {type(fault).__name__ for fault in FAULTS}
