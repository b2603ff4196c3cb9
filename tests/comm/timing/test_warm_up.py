"""Steps that are left out at the beginning and behind a change of size, and what such a change costs."""

import numpy as np
import pytest

from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.warm_up import WarmUp

FIRST = SETTINGS.warm_up_steps


def warm(size=4):
    """Behind the first steps of a process."""
    warm_up = WarmUp()
    warm_up.change_size(size)
    for _ in range(FIRST):
        warm_up.end_step(1.0)
    return warm_up


def cost_of(warm_up, size, first, second=1.0):
    warm_up.change_size(size)
    warm_up.end_step(first)
    warm_up.end_step(second)


def test_first_steps_of_a_process_are_left_out():
    warm_up = WarmUp()
    warm_up.change_size(4)
    seen = []
    for _ in range(FIRST + 2):
        assert warm_up.settling == (len(seen) < FIRST)
        seen.append(warm_up.end_step(1.0))
    assert seen == [True] * FIRST + [False] * 2


def test_the_first_step_of_another_size_is_left_out():
    warm_up = warm()
    warm_up.change_size(6)
    assert warm_up.size == 6
    assert warm_up.settling
    assert [warm_up.end_step(1.0) for _ in range(3)] == [True, False, False]
    assert not warm_up.settling


def test_also_of_a_size_that_was_seen_before():
    """It says nothing of the cost, though: what a new size needs was made then."""
    warm_up = warm(4)
    for size in (6, 4, 6, 4):
        cost_of(warm_up, size, 50.0)
    assert warm_up.change_cost is None, "6 alone was new"
    warm_up.change_size(6)
    assert [warm_up.end_step(1.0) for _ in range(2)] == [True, False]


def test_a_change_during_the_first_steps_leaves_out_no_fewer():
    warm_up = WarmUp()
    warm_up.change_size(4)
    warm_up.end_step(1.0)
    warm_up.change_size(6)
    assert [warm_up.end_step(1.0) for _ in range(4)] == [True] * (FIRST - 1) + [False] * (5 - FIRST)


def test_a_new_size_is_watched_for_two_steps():
    """The second one is not left out, and is reported all the same, since the cost is not known without it."""
    warm_up = warm()
    warm_up.change_size(6)
    warm_up.end_step(3.0)
    assert warm_up.settling
    assert not warm_up.end_step(1.0)
    assert not warm_up.settling


@pytest.mark.parametrize("seed", range(3))
def test_cost_is_the_lower_one_of_the_last_two(seed):
    rng, warm_up, costs = np.random.default_rng(seed), warm(), []
    for size in range(10, 16):
        first, second = rng.random(2)
        cost_of(warm_up, size, first, second)
        costs.append(max(first - second, 0.0))
        assert warm_up.change_cost == (min(costs[-2:]) if len(costs) > 1 else None)
    assert len(set(costs)) > 2


def test_a_size_that_changes_again_before_its_second_step_has_no_cost():
    warm_up = warm()
    cost_of(warm_up, 6, 5.0)
    warm_up.change_size(7)
    warm_up.end_step(100.0)
    cost_of(warm_up, 8, 4.0)
    assert warm_up.change_cost == 3.0


def test_the_first_size_of_a_process_has_no_cost():
    """Its first steps are slower for other reasons."""
    warm_up = WarmUp()
    cost_of(warm_up, 4, 9.0)
    cost_of(warm_up, 6, 9.0)
    assert warm_up.change_cost is None
