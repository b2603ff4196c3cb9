"""Two runs beside each other: what is compared, what is not and why, and when the second one counts as slower."""

import math
from dataclasses import replace

import pytest

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.records import WorkerRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report import compare_runs
from lightning_hetero.report.compare import compared_text
from tests.report.runs import Cluster, header, simulated

FAST = simulated(rounds=4, steps=5, straggler=False)
SLOW = simulated(Cluster(link=(0.01, 0.01, 0.02)), rounds=4, steps=5, straggler=False)
NAMES = ("first", "second")


def test_figures_of_both_and_their_ratios():
    found = compare_runs(FAST, SLOW)
    a, b = RunFigures(FAST), RunFigures(SLOW)
    assert (found.rate.a, found.rate.b) == (a.rate, b.rate)
    assert found.regression == pytest.approx(1 - b.rate / a.rate)
    assert found.regression > 0.1
    figures = {one.name: one for one in found.figures}
    assert figures["step_time"].ratio == pytest.approx(b.step_time / a.step_time)
    assert figures["rate of rank 1 (NVIDIA Tesla V100-PCIE-16GB)"].a == a.workers[1].rate
    assert found.notes == ()
    text = compared_text(found, NAMES)
    assert f"B is {100 * found.regression:.1f} % slower than A" in text
    assert f"{a.speed_up:.2f}x" in text


def test_a_limit_is_exceeded_only_by_a_slower_second_run():
    assert compare_runs(FAST, SLOW).exceeds(0.05)
    assert not compare_runs(FAST, SLOW).exceeds(0.9)
    assert not compare_runs(SLOW, FAST).exceeds(0.0)
    assert not compare_runs(FAST, FAST).exceeds(0.0)
    assert "faster than A" in compared_text(compare_runs(SLOW, FAST), NAMES)


def test_other_workers_are_compared_where_they_match():
    other = replace(SLOW.header.workers[2], identity="gpu:other", device="T4")
    changed = replace(SLOW, header=replace(SLOW.header, workers=(*SLOW.header.workers[:2], other)))
    found = compare_runs(FAST, changed)
    ranks = [one.name.split(" ")[3] for one in found.figures if one.name.startswith("rate of")]
    assert ranks == ["0", "1"]
    assert any("the 2 ranks with the same hardware" in note for note in found.notes)
    none = replace(SLOW, header=replace(SLOW.header, workers=(WorkerRecord("x", "y"),) * 3))
    assert any("no single worker" in note for note in compare_runs(FAST, none).notes)
    fewer = simulated(Cluster(speeds=(1.0, 0.5)), rounds=4, steps=5, straggler=False)
    assert any("3 and 2 of them" in note for note in compare_runs(FAST, fewer).notes)


def test_a_run_without_timed_steps_has_nothing_to_compare():
    found = compare_runs(FAST, RunRecord(header()))
    assert math.isnan(found.regression)
    assert not found.exceeds(0.0)
    assert "not known" in compared_text(found, NAMES)
    assert found.to_dict()["figures"]["rate"]["b"] is None
