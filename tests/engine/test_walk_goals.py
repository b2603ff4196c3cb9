"""The walks of the page on the architecture are no longer than their goals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = {
    "a step without a sync round": "step",
    "the gradient of a compressed step": "gradient",
    "a decision on time to accuracy": "decision",
    "the same with a certain noise scale": "decision_certain",
}
COLUMNS = {"files": "files", "changes": "changes_by_calls", "calls": "calls"}


@pytest.mark.slow("traces four walks in a process of its own")
def test_a_walk_is_no_longer_than_its_goal(tmp_path):
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.search(r"<!-- numbers: benchmarks/results/walks.json -->\n\n((?:\|.*\n)+)", page)[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    command = [sys.executable, "benchmarks/walks.py", "--json", str(tmp_path / "walks.json")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    walked = {row["walk"]: row for row in json.loads((tmp_path / "walks.json").read_text())["rows"]}
    for name, *cells in rows:
        goals = re.findall(r"(\d+) (files|changes|calls)", cells[3])
        assert goals
        for most, column in goals:
            assert walked[NAMED[name]][COLUMNS[column]] <= int(most), name
