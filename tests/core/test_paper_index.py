"""The index of the papers leads to code that can be imported and to tests that exist, and names all that code cites."""

import ast
import importlib
import re
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest

from lightning_hetero.core import INDEX, PAPERS

ROOT = Path(__file__).parents[2]
CORE = sorted({*(ROOT / "lightning_hetero" / "core").rglob("*.py")} - {ROOT / "lightning_hetero/core/paper_index.py"})
CITED = re.compile(r"(?:\b(\w+) )?\b(eq|Alg)\. (\d+)(?:-(\d+))?")

every_entry = pytest.mark.parametrize("entry", INDEX, ids=lambda entry: f"{entry.cited} {entry.what}")


@cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body if hasattr(node, "name")}


@every_entry
def test_code_can_be_imported(entry):
    module, _, name = entry.code.partition(":")
    attrgetter(name)(importlib.import_module(f"lightning_hetero.{module}"))


@every_entry
def test_test_exists(entry):
    file, _, name = entry.test.partition("::")
    assert name.startswith("test_")
    assert name in functions(file)


def test_every_numbered_equation_of_the_papers_is_there():
    there = {entry.cited for entry in INDEX}
    assert {f"C eq. {number}" for number in range(1, 13)} <= there
    assert {f"S eq. {number}" for number in range(1, 7)} <= there
    assert {f"D eq. {number}" for number in range(1, 6)} <= there
    assert {"C Alg. 1", "A Alg. 1", "A Alg. 2", "S Alg. 1"} <= there


def test_entries_are_sorted_by_paper_and_name_no_place_twice():
    assert [entry.paper for entry in INDEX] == sorted((e.paper for e in INDEX), key=list(PAPERS).index)
    places = [(entry.cited, entry.code, entry.test) for entry in INDEX]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_code_cites_has_its_letter_and_is_in_the_index(path):
    there = {entry.cited for entry in INDEX}
    for letter, kind, first, last in CITED.findall(path.read_text()):
        assert letter in PAPERS, f"{kind}. {first} is of which paper? Write its letter before it."
        numbers = range(int(first), int(last or first) + 1)
        assert {f"{letter} {kind}. {number}" for number in numbers} <= there
