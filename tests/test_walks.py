"""The walks of the page on the architecture are no longer than their goals, and its figures are measured."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = {
    "a step without a sync round": "step",
    "the gradient of a compressed step": "gradient",
    "a decision on time to accuracy": "decision",
    "the same with a certain noise scale": "decision_certain",
}
COLUMNS = {"files": "files", "changes": "changes_by_calls", "calls": "calls"}


def table():
    """Cells of the page's table, by the name of the walk."""
    found = re.search(r"<!-- numbers: benchmarks/results/walks.json -->\n\n((?:\|.*\n)+)", PAGE)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()[2:]]
    return {NAMED[name]: cells for name, *cells in rows}


def by_walk(path):
    return {row["walk"]: row for row in json.loads(path.read_text())["rows"]}


def test_the_page_has_the_numbers_of_the_benchmark():
    measured = by_walk(ROOT / "benchmarks" / "results" / "walks.json")
    for walk, cells in table().items():
        assert [int(cell) for cell in cells[:3]] == [measured[walk][column] for column in COLUMNS.values()]
    assert max(measured[walk]["milliseconds"] for walk in ("decision", "decision_certain")) < 50


def test_a_decision_takes_the_same_time_for_any_number_of_tensors():
    measured = json.loads((ROOT / "benchmarks" / "results" / "decide.json").read_text())["rows"]
    said = re.findall(r"(\d+) ms with (\d+)", PAGE)
    assert {int(tensors): int(taken) for taken, tensors in said} == {
        row["tensors"]: round(row["milliseconds"]) for row in measured
    }
    assert max(row["milliseconds"] for row in measured) < 50
    assert all(row["total_to"] != row["total_from"] for row in measured), "the total moves"


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The figures of this machine and state."""
    path = tmp_path_factory.mktemp("walks") / "walks.json"
    command = [sys.executable, "benchmarks/walks.py", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return by_walk(path)


@pytest.mark.parametrize("walk", NAMED.values())
def test_a_walk_is_no_longer_than_its_goal(walked, walk):
    goals = re.findall(r"(\d+) (files|changes|calls)", table()[walk][3])
    assert goals
    for most, column in goals:
        assert walked[walk][COLUMNS[column]] <= int(most)
