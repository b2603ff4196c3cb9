"""Timers of simulated steps: which steps give a row, and what a change of size is seen to cost."""

import numpy as np

from lightning_hetero.simulate.cluster.control.virtual_timer import VirtualTimer
from lightning_hetero.simulate.cluster.truth.step_events import StepTimes, bucket_times


def steps(sizes, seconds, buckets=1):
    """Steps at one split, of which each takes a number of seconds."""
    a = np.repeat(np.array(seconds, dtype=float)[:, None], len(sizes), axis=1)
    p, shares = np.zeros_like(a), np.ones(buckets)
    done = bucket_times(a, p, shares, np.zeros((len(a), buckets)))
    return StepTimes(np.array(sizes, dtype=float), a, p, shares, done)


def rows(timer):
    """Seconds of the steps that gave a row since the last call."""
    return timer.take().forward[:, 0].tolist()


def test_warm_up_steps_give_no_row():
    timer = VirtualTimer(2)
    timer.see(steps((4, 4), [1, 2]))
    assert rows(timer) == []
    timer.see(steps((4, 4), [3, 4, 5]))
    assert rows(timer) == [4, 5]


def test_the_first_step_of_a_new_size_on_any_rank_gives_no_row():
    timer = VirtualTimer(3)
    timer.see(steps((4, 4, 4), [1, 2, 3, 4]))
    timer.see(steps((4, 5, 3), [5, 6]))
    timer.see(steps((4, 5, 3), [7]))
    timer.see(steps((4, 4, 4), [8, 9]))
    assert rows(timer) == [4, 6, 7, 9]


def test_the_cost_of_a_change_is_what_the_first_rank_measures():
    timer = VirtualTimer(2)
    timer.see(steps((4, 4), [1, 1, 1, 1]))
    timer.see(steps((5, 3), [4, 1, 1]))
    assert timer.change_cost is None
    timer.see(steps((5, 4), [9, 1]))  # the size of the first rank stays
    timer.see(steps((4, 4), [9, 1]))  # it has run before
    assert timer.change_cost is None
    timer.see(steps((6, 2), [3, 1]))
    assert timer.change_cost == 2.0
