"""Two runs beside each other: what is compared, what is not and why, and when the second one counts as slower."""

from dataclasses import replace

import pytest

from lightning_hetero.core.report.records import WorkerRecord
from lightning_hetero.report import RunFigures, compare_runs
from tests.report.runs import Cluster, simulated

FAST = simulated(rounds=4, steps=5, straggler=False)
SLOW = simulated(Cluster(link=(0.01, 0.01, 0.02)), rounds=4, steps=5, straggler=False)


def test_figures_of_both_and_their_ratios():
    found, a, b = compare_runs(FAST, SLOW), RunFigures(FAST), RunFigures(SLOW)
    figures = {one.name: one for one in found.figures}
    assert (found.rate.a, found.rate.b) == (a.rate, b.rate)
    assert found.regression == pytest.approx(1 - b.rate / a.rate)
    assert figures["step_time"].ratio == pytest.approx(b.step_time / a.step_time)
    assert figures["rate of rank 1 (NVIDIA Tesla V100-PCIE-16GB)"].a == a.workers[1].rate
    assert found.notes == ()


FIRST, SECOND, THIRD = SLOW.header.workers


@pytest.mark.parametrize(
    ("other", "ranks"),
    [
        ((FIRST, SECOND, replace(THIRD, identity="gpu:other", device="T4")), ["0", "1"]),
        ((WorkerRecord("x", "y"),) * 3, []),
    ],
    ids=["one of them differs", "all differ"],
)
def test_other_workers_are_compared_where_they_match(other, ranks):
    found = compare_runs(FAST, replace(SLOW, header=replace(SLOW.header, workers=other)))
    assert [one.name.split(" ")[3] for one in found.figures if one.name.startswith("rate of")] == ranks
    assert len(found.notes) >= 1
