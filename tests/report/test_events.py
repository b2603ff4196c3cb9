"""Tables of what happened when: how stragglers ended, and how long those lasted that did not end."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.core.report.records import StragglerRecord
from lightning_hetero.report.events import RELIEVED, change_table, kept_table, straggler_table
from tests.report.runs import simulated

PAGE = (Path(__file__).parents[2] / "docs" / "run-record.md").read_text()
RUN = simulated(rounds=8, steps=6)


def test_every_way_to_end_is_in_the_docs_and_has_words():
    (meaning,) = re.findall(r"^\| `relieved` .*$", PAGE, re.M)
    assert set(re.findall(r'`"([^"]+)"`', meaning)) == set(RELIEVED) - {""}
    for how in RELIEVED:
        lines = *RUN.stragglers[:1], replace(RUN.stragglers[1], relieved=how)
        (row,) = straggler_table(replace(RUN, stragglers=lines)).rows
        assert row[-1] == RELIEVED[how] != how


def test_a_straggler_that_did_not_end_has_cost_all_steps_since_then():
    run = replace(RUN, stragglers=RUN.stragglers[:1])
    (row,) = straggler_table(run).rows
    later = sum(one.count for one in run.rounds if one.time > run.stragglers[0].time)
    assert row[3] == "to the end"
    assert row[5].value == pytest.approx(later * run.stragglers[0].cost)
    assert row[6] == "it did not end"


def test_a_straggler_whose_begin_is_missing_has_its_end():
    end = StragglerRecord(3.0, "end", -1, "link", 0, 17, 0.0, 2.5, "recovered")
    (row,) = straggler_table(replace(RUN, stragglers=(end,))).rows
    assert (row[0], row[2], row[3].value, row[5].value) == ("link", "", 17, 2.5)


def test_reasons_in_succession_are_one_row_and_of_many_the_newest_are_shown():
    kept = ["a", "a", "", "a", "b", "b"]
    rounds = [replace(RUN.rounds[0], step=10 * i + 9, count=10, kept=why) for i, why in enumerate(kept)]
    table = kept_table(replace(RUN, rounds=tuple(rounds)))
    assert [(row[0].value, row[1].value, row[2]) for row in table.rows] == [(0, 20, "a"), (30, 40, "a"), (40, 60, "b")]
    assert table.note == ""
    rounds = [replace(RUN.rounds[0], step=i, count=1, kept=f"reason {i}") for i in range(70)]
    table = kept_table(replace(RUN, rounds=tuple(rounds)))
    assert (len(table.rows), table.rows[-1][2], table.note) == (60, "reason 69", "10 earlier rows are left out.")


def test_of_many_changes_and_stragglers_the_newest_are_shown():
    changes = [replace(RUN.changes[0], step=i, reason=f"reason {i}") for i in range(61)]
    table = change_table(replace(RUN, changes=tuple(changes)))
    assert (len(table.rows), table.rows[0][2], table.note) == (60, "reason 1", "1 earlier changes are in the record.")
    lines = [replace(RUN.stragglers[0], rank=0, time=float(i)) for i in range(61)]
    table = straggler_table(replace(RUN, stragglers=tuple(lines)))
    assert (len(table.rows), table.note) == (60, "1 earlier stragglers are in the record.")
    assert straggler_table(RUN).note == change_table(RUN).note == ""
