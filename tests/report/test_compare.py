"""Two runs beside each other: figures and their ratio, and workers where they match."""

from dataclasses import replace

import pytest

from lightning_hetero.core.report.records import WorkerRecord
from lightning_hetero.report import RunFigures, compare_runs
from tests.report.runs import Cluster, simulated

FAST = simulated(rounds=4, steps=5, straggler=False)
SLOW = simulated(Cluster(link=(0.01, 0.01, 0.02)), rounds=4, steps=5, straggler=False)
FIRST, SECOND, THIRD = SLOW.header.workers


@pytest.mark.parametrize(
    ("other", "ranks"),
    [
        ((FIRST, SECOND, THIRD), ["0", "1", "2"]),
        ((FIRST, SECOND, replace(THIRD, identity="gpu:other", device="T4")), ["0", "1"]),
        ((WorkerRecord("x", "y"),) * 3, []),
    ],
    ids=["the same", "one of them differs", "all differ"],
)
def test_other_workers_are_compared_where_they_match(other, ranks):
    second = replace(SLOW, header=replace(SLOW.header, workers=other))
    found, a, b = compare_runs(FAST, second), RunFigures(FAST), RunFigures(second)
    figures = {one.name: one for one in found.figures}
    assert figures["step_time"].ratio == pytest.approx(b.step_time / a.step_time)
    assert [name.split(" ")[3] for name in figures if name.startswith("rate of")] == ranks
    assert bool(found.notes) == (other != SLOW.header.workers)
