"""Settings of the timers: frozen, and each of them changes what the timers do."""

from dataclasses import FrozenInstanceError, fields, replace
from itertools import count

import pytest

from lightning_hetero.comm.timing.bucket_timer import BucketTimer
from lightning_hetero.comm.timing.message_timer import MessageTimer
from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.comm.timing.warm_up import WarmUp


class Ticks:
    """A clock that is a second further at each mark."""

    def __init__(self):
        self.mark = map(float, count()).__next__

    def ready(self, mark):
        return True

    def seconds(self, start, end):
        return end - start


def step_rows(settings, steps):
    """Numbers of the steps that a table of the step timer has, and its length."""
    timer = StepTimer(Ticks(), settings=settings)
    for _ in range(steps):
        timer.begin_step(4, regular=True)
        timer.begin_backward()
        timer.bucket_done(timer.bucket_ready())
        timer.end_backward()
        timer.end_step()
    table = timer.take()
    return table[table[:, 0] == table[:, 0], 0].tolist(), len(table)


def message_rows(settings, steps):
    timer = MessageTimer(Ticks(), 1, settings)
    for step in range(steps):
        timer.send(step, 100.0)(0)
    table = timer.take()
    return table[table[:, 0] == table[:, 0], 0].tolist(), len(table)


def bucket_rows(settings, steps):
    timer = BucketTimer(Ticks(), settings)
    for _ in range(steps):
        release, arrive = timer.ready(0), timer.send()
        arrive()
        release()
    return [span[0] for span in timer.spans()], len(timer.take(1))


def test_defaults_are_frozen():
    assert TimingSettings() == SETTINGS
    assert {field.name: getattr(SETTINGS, field.name) for field in fields(SETTINGS)} == {
        "max_steps": 32,
        "warm_up_steps": 3,
        "change_costs": 2,
        "min_steps": 8,
        "all_rows": 64_000,
    }
    with pytest.raises(FrozenInstanceError):
        SETTINGS.max_steps = 1


@pytest.mark.parametrize(
    ("ranks", "kept"), [(1, 32), (2000, 32), (2001, 31), (4000, 16), (8000, 8), (10_000, 8), (1_000_000, 8)]
)
def test_the_more_ranks_the_fewer_steps_of_each(ranks, kept):
    assert SETTINGS.of(ranks) == replace(SETTINGS, max_steps=kept)


def test_few_steps_stay_few():
    assert TimingSettings(max_steps=4).of(10_000).max_steps == 4
    assert TimingSettings(min_steps=3, all_rows=8).of(4).max_steps == 3


@pytest.mark.parametrize("kept", [1, 4, 7])
def test_each_timer_keeps_so_many_of_the_newest_steps(kept):
    settings = replace(SETTINGS, max_steps=kept, warm_up_steps=0)
    assert step_rows(settings, 10) == (list(range(11 - kept, 11)), kept)
    assert message_rows(settings, 10) == (list(range(10 - kept, 10)), kept)
    assert bucket_rows(settings, 10) == (list(range(11 - kept, 11)), kept)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_so_many_first_steps_are_left_out(first):
    numbers, _ = step_rows(replace(SETTINGS, warm_up_steps=first), 8)
    assert numbers == list(range(first + 1, 9))


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_the_lowest_of_so_many_newest_costs_counts(newest):
    warm_up, seen = WarmUp(replace(SETTINGS, change_costs=newest)), []
    costs = [1.0, 6.0, 4.0, 9.0, 7.0]
    warm_up.change_size(100)
    for size, cost in enumerate(costs):
        warm_up.change_size(size)
        warm_up.end_step(2.0 + cost)
        warm_up.end_step(2.0)
        seen.append(warm_up.change_cost)
    expected = [min(costs[i + 1 - newest : i + 1]) if i + 1 >= newest else None for i in range(len(costs))]
    assert seen == expected
