"""Stragglers of a run: rank 0 logs and records each when it begins and when it ends, with the step and the cost."""

import pytest

from lightning_hetero.engine.watch.watch import RunWatch
from tests.engine.watch.watched import CPU, Run, seen


def test_a_straggler_is_logged_once_and_recorded(caplog):
    caplog.set_level("INFO", logger="lightning_hetero")
    run = Run()
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),) * 3 + ((0.1, 0.1, 0.1),):
        run.round(seen(times))
    begin, end = run.watch.run.stragglers
    assert (begin.event, begin.rank, begin.phase, begin.step) == ("begin", 2, "backward", 17)
    assert (end.event, end.relieved, end.step) == ("end", "recovered", 48)
    assert end.lost == pytest.approx(0.1 * 24)
    lines = [line for line in caplog.messages if "rank 2" in line]
    assert len(lines) == 2
    assert "rank 2 (device 2) has made all others wait since epoch 0 step 17" in lines[0]


@pytest.mark.parametrize(("accumulation", "since"), [(1, 20), (2, 39), (4, 77)])
def test_a_straggler_began_so_many_batches_ago_as_its_steps_had(accumulation, since):
    """It was slow in the last five of the eight steps, whose times are those of a micro-batch."""
    run, values = Run(), seen((0.1, 0.1, 0.1))
    for _ in range(2):
        run.round(values, accumulation=accumulation)
    values = seen((0.1, 0.1, 0.3))
    values.backward[:3, 2] = 0.1
    run.round(values, accumulation=accumulation)
    (one,) = run.watch.run.stragglers
    assert (one.step, one.cost) == (since, pytest.approx(0.2 * accumulation))


def test_a_straggler_began_in_the_running_epoch_at_most_with_it():
    run = Run()
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),):
        run.round(seen(times), at=(3, 2))
    assert [(one.epoch, one.step) for one in run.watch.run.stragglers] == [(3, 0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_warns_of_workers_and_tells_of_all_else(caplog, rank):
    caplog.set_level("INFO", logger="lightning_hetero")
    run = Run(rank)
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),) * 2 + ((0.1, 0.1, 0.1),):
        run.round(seen(times))
    for link in (0.1, 0.1, 0.01):
        run.round(seen((0.1, 0.1, 0.1), link=link))
    said = [(one.levelname, one.getMessage().partition(" since")[0].partition(" as of")[0]) for one in caplog.records]
    expected = [
        ("WARNING", "rank 2 (device 2) has made all others wait"),
        ("INFO", "rank 2 (device 2) no longer makes the others wait"),
        ("INFO", "the link has been slower"),
        ("INFO", "the link is no longer slower"),
    ]
    assert said == (expected if rank == 0 else [])


@pytest.mark.parametrize(("described", "name"), [(True, "rank 0 (device 0)"), (False, "rank 0")])
def test_a_run_that_is_not_described_names_ranks_alone(caplog, described, name):
    run = Run()
    run.watch = run.watch if described else RunWatch(0, 3, CPU)
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.2, 0.1, 0.1),):
        run.round(seen(times))
    assert f"{name} has made all others wait" in caplog.text
