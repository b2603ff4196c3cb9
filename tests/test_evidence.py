"""The evidence page is what the committed results say, and each of its rows can be produced."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "evidence.py"))
MODULES = {name: SCRIPT["module_of"](name) for name in SCRIPT["PAPERS"]}
ROWS = [(name, row) for name, module in MODULES.items() for row in module.ROWS]


def test_the_page_is_that_of_the_committed_results():
    text = SCRIPT["PAGE"].read_text()
    assert text == SCRIPT["page"](text), "run make map"


def scripts_of(command):
    return [ROOT / word for word in shlex.split(command) if word.endswith(".py")]


@pytest.mark.parametrize("name", SCRIPT["PAPERS"])
def test_every_row_has_a_command_that_writes_its_result(name):
    for row in MODULES[name].ROWS:
        if not row.command:
            assert row.verdict == "open"
            continue
        (script,) = scripts_of(row.command)
        assert script.is_file(), row.command
        written = script.read_text() + "".join(path.read_text() for path in script.parent.glob("_*.py"))
        stem = row.result.removesuffix(".json")
        parts = {stem, re.sub(rf"^{name}_", "", stem), stem.split("_")[-1]}
        assert any(part in written for part in parts), f"{row.command} does not write {row.result}"


@pytest.mark.parametrize("name", SCRIPT["PAPERS"])
def test_every_figure_comes_from_its_result(name):
    """No row has its numbers in the text: without the result there is none."""
    for row in MODULES[name].ROWS:
        if row.result:
            assert SCRIPT["record"](row.result)["hardware"]["cpu"]
            with pytest.raises((KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration)):
                row.ours({"rows": [], "hardware": {}, "title": ""})


def test_every_paper_has_rows_that_do_not_hold_or_are_open():
    """A page on which everything holds would not have been looked at closely."""
    for module in MODULES.values():
        assert {row.verdict for row in module.ROWS} - {"holds"}


def test_own_tables_name_scripts_that_exist():
    for _, command, _, result in SCRIPT["OWN"].values():
        (script,) = scripts_of(command)
        assert result in script.read_text()
