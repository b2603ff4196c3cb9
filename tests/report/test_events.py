"""Tables of what happened when: how stragglers ended, and how long those lasted that did not end."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.core.report.records import StragglerRecord
from lightning_hetero.report.events import RELIEVED, straggler_table
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
