"""Places of changes on the axis of steps, and which rounds, workers and lines are shown of many."""

from dataclasses import replace

import pytest

from lightning_hetero.core.report.records import RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report.series import StepAxis, round_series
from tests.report.runs import header, simulated


def at(epoch, step, count, sizes=(4, 4)):
    return RoundRecord(float(10 * epoch + step), epoch, step, count, 0, sizes)


AXIS = StepAxis(RunRecord(header(), (at(0, 9, 10), at(0, 19, 10), at(1, 4, 15), at(1, 14, 10))))


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        ((0, 0), 0),
        ((0, 5), 5),
        ((0, 10), 10),
        ((0, 12), 12),
        ((0, 25), 25),
        ((0, 35), 30),  # by the round of the next one, the epoch has 30 steps
        ((1, 0), 30),
        ((1, 3), 33),
        ((1, 15), 45),
        ((1, 20), 50),
        ((2, 0), 45),
        ((2, 3), 48),
    ],
)
def test_a_step_of_an_epoch_has_its_place_on_the_axis(place, steps):
    assert AXIS.at(*place) == steps


def test_batches_of_accumulated_steps_are_counted_as_steps():
    """Rounds of ten steps with four batches each, and a last one with two batches a step."""
    rounds = [replace(at(0, 40 * k - 1, 10), accumulation=4) for k in (1, 2, 3)]
    axis = StepAxis(RunRecord(header(), (*rounds, replace(at(0, 139, 10), accumulation=2))))
    steps = {0: 0, 20: 5, 40: 10, 88: 22, 100: 25, 119: 29.75, 120: 30, 130: 35, 140: 40, 150: 45}
    assert {batch: axis.at(0, batch) for batch in steps} == steps
    axis = StepAxis(RunRecord(header(), (rounds[0], replace(at(1, 19, 10), accumulation=4))))
    assert [axis.at(0, 44), axis.at(1, 0), axis.at(1, 8), axis.at(2, 8)] == [11, 15, 17, 22]


def test_epochs_without_a_round_lie_between_their_neighbors():
    axis = StepAxis(RunRecord(header(), (at(0, 9, 10), at(4, 9, 90))))
    assert [axis.at(epoch, 3) for epoch in (0, 1, 2, 3, 4, 5)] == [3, 30, 50, 70, 93, 103]


def test_steps_before_the_first_round_are_counted_from_the_beginning():
    assert [StepAxis(RunRecord(header(), (at(1, 4, 25),))).at(*place) for place in ((0, 3), (1, 0))] == [3, 20]


def test_without_a_round_all_is_at_the_beginning():
    assert StepAxis(RunRecord(header())).at(3, 4) == 0


def test_a_split_begins_where_its_change_says():
    run = simulated(rounds=3, steps=10, straggler=False)
    series = round_series(run)
    assert series.steps.tolist() == [10, 20, 30]
    assert series.starts.tolist() == [0, 12, 20], "the change holds from two steps after the round on"
    assert series.last == 30
