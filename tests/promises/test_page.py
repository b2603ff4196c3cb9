"""The page of promises is up to date: each has tests that exist and may fail, or a reason why nothing is promised."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.promises.faults import FAULTS, LEFT_OUT, MODES

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "reliability.py"))
ROWS = SCRIPT["ROWS"]


def test_the_page_is_up_to_date():
    text = SCRIPT["PAGE"].read_text()
    assert text == SCRIPT["page"](text), "run make map"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_promise_has_tests_that_exist_and_may_fail_and_a_bound_or_a_reason(row):
    assert ((row.tests or row.faults) and row.bound) or row.reason
    for test in row.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), path
        functions = [one for one in ast.parse((ROOT / path).read_text()).body if isinstance(one, ast.FunctionDef)]
        found = [ast.unparse(mark) for one in functions if one.name == name for mark in one.decorator_list]
        assert not name or name in [one.name for one in functions], f"{path} has no {name}"
        assert not [mark for mark in found if re.search(r"mark\.(xfail|skip)\b", mark)]


def test_every_fault_of_the_table_shows_a_promise_and_what_is_left_out_exists():
    assert {name for row in ROWS for name in row.faults} == {type(fault).__name__ for fault in FAULTS}
    for kinds, modes, _ in LEFT_OUT:
        assert set(modes) <= set(MODES)
        assert all(any(str(fault).startswith(kind) for fault in FAULTS) for kind in kinds)
