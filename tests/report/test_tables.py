"""Tables about workers: of many, the others are one row of means, and equal devices are one row."""

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.report.tables import worker_table
from tests.report.runs import Cluster, simulated

MANY = simulated(Cluster(speeds=(1.0, 0.5, 0.4, 0.3) * 10), total=1000, rounds=3, steps=2, straggler=False)


def test_workers_that_are_not_shown_have_a_row_of_means():
    figures = RunFigures(MANY)
    table = worker_table(figures)
    shown = {int(row[0]) for row in table.rows[:-1]}
    others = [one for one in figures.workers if one.rank not in shown]
    assert (len(shown), len(others)) == (16, 24)
    row = dict(zip(table.header, table.rows[-1], strict=True))
    assert row["rank"] == "24 others"
    for name, value in (
        ("samples", [one.size for one in others]),
        ("share", [one.share for one in others]),
        ("samples/s", [one.rate for one in others]),
        ("idle", [one.idle for one in others]),
        ("waiting", [figures.step_time - one.compute for one in others]),
        *((name, [one.phases[name] for one in others]) for name in PHASES),
    ):
        assert row[name].value == pytest.approx(np.mean(value)), name


def test_few_workers_have_a_row_each_and_no_note():
    table = worker_table(RunFigures(simulated(rounds=2, steps=2, straggler=False)))
    assert [row[0] for row in table.rows] == ["0", "1", "2"]
    assert table.note == ""
