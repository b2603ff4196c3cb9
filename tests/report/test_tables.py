"""Tables about workers: of many, the others are one row of means, and equal devices are one row."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.records import WorkerRecord
from lightning_hetero.core.report.what_if import WhatIf
from lightning_hetero.report.tables import best_change, hardware_table, sizes_text, what_if_table, worker_table
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


def test_devices_of_one_kind_are_one_row_with_the_most_memory():
    run = simulated(Cluster(speeds=(1.0, 0.5, 1.0, 1.0)), rounds=2, steps=2, straggler=False)
    run = replace(run, end=replace(run.end, memory=(1e9, 5e9, 3e9, float("nan"))))
    table = hardware_table(run)
    assert [(row[0], row[-1].value) for row in table.rows] == [("0, 2-3", 3e9), ("1", 5e9)]
    workers = tuple(WorkerRecord(f"kind {i}", "x") for i in range(70))
    assert hardware_table(replace(run, header=replace(run.header, workers=workers))).note.startswith("10 more kinds")


def test_sizes_of_many_workers_are_counted():
    assert sizes_text((1,) * 16) == " ".join("1" * 16)
    assert sizes_text((1,) * 17) == "17 x 1"
    assert sizes_text(tuple(range(20))).endswith(", and 14 more sizes")
    assert "more sizes" not in sizes_text((1, 2, 3, 4, 5, 6) * 3)


def test_equal_changes_share_a_row_and_the_best_one_is_named():
    found = (WhatIf("without", 0, 0.2, -0.5), WhatIf("without", 2, 0.09, 0.1), WhatIf("without", 3, 0.09, 0.1))
    run = simulated(Cluster(speeds=(1.0, 0.5, 0.3, 0.3)), rounds=2, steps=2, straggler=False)
    table = what_if_table(run, found)
    assert [row[1] for row in table.rows] == ["2-3", "0"], "the largest gain first"
    assert table.note == ""
    assert best_change(run, found).startswith("rank 2 (NVIDIA Quadro RTX 6000) makes the job slower: without it, ")
    assert "10.0 % faster" in best_change(run, found)
    assert best_change(run, found[:1]).startswith("No worker makes the job slower")
    assert best_change(run, ()) == ""
    many = tuple(WhatIf("without", i, 0.1 + i, -0.1 * i) for i in range(21))
    assert len(what_if_table(run, many).rows) == 20
    assert what_if_table(run, many).note == "Shown are the largest gains of each change."
