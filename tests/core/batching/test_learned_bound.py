"""Upper bounds that the controller learns where throughput fell after a rise: when, for how long, and when not."""

import numpy as np
import pytest

from lightning_hetero.core.batching.learned_bound import LearnedBound
from lightning_hetero.core.batching.proportional_control import ControllerState, control, smooth
from tests.core.batching.test_proportional_control import Cluster, drive, spread


class Thrashing(Cluster):
    """Worker 0 has memory for 60 samples; above that every sample takes ``times`` as long."""

    def __init__(self, *args, times=5.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = times

    def times(self, sizes):
        over = (np.arange(len(sizes)) == 0) & (np.asarray(sizes) > 60)
        return super().times(sizes) * np.where(over, self.factor, 1.0)


def excess(cluster, sizes, best):
    """How much longer the slowest worker takes than with the best sizes."""
    return max(cluster.slopes * np.asarray(sizes)) / max(cluster.slopes * np.asarray(best)) - 1


def held(state):
    return tuple(bound.size if bound is not None and bound.holds else 0 for bound in state.bounds)


def test_upper_bound_is_learned_where_throughput_fell_after_a_rise():
    cluster = Thrashing([0.001, 0.003], [0, 0])
    state, changes = drive(cluster, ControllerState((50, 50)), 100, 2)
    assert changes == [0, 1]
    assert held(state) == (50, 0)
    assert state.local_batch_sizes == (50, 50)


@pytest.mark.parametrize("times", [2.0, 5.0])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_bound_whose_cause_stays_is_tried_ever_more_rarely(times, noise):
    """The fall comes back at each trial, and each lasts longer; half of the way, and half of that, ends at the edge."""
    cluster = Thrashing([0.001, 0.003], [0, 0], noise, times=times)
    state, changes = drive(cluster, ControllerState((50, 50)), 100, 170, steps=10)
    assert len(changes) <= 12
    assert not [decision for decision in changes if 60 < decision < 165]
    assert 50 < state.local_batch_sizes[0] <= 60


def test_a_cliff_that_pays_to_cross_is_crossed():
    """Above 60 samples worker 0 takes 1.3 times as long: with 70 of 100 it is done together with the other."""
    state, changes = drive(Thrashing([0.001, 0.003], [0, 0], times=1.3), ControllerState((50, 50)), 100, 20)
    assert state.local_batch_sizes == (70, 30)
    assert len(changes) <= 3


def test_learned_bound_lapses_when_its_cause_is_over():
    state, _ = drive(Thrashing([0.001, 0.003], [0, 0]), ControllerState((50, 50)), 100, 6)
    assert held(state)[0]
    healthy = Cluster([0.001, 0.003], [0, 0])
    after, changes = drive(healthy, state, 100, 12)
    assert after.bounds == (None, None)
    assert spread(healthy, after.local_batch_sizes) <= 1.1
    assert len(changes) <= 4


@pytest.mark.parametrize("speed", [0.7, 1.4])
def test_a_bound_is_forgotten_where_its_worker_is_no_longer_the_same(speed):
    state, _ = drive(Thrashing([0.001, 0.003], [0, 0]), ControllerState((50, 50)), 100, 6)
    assert held(state)[0]
    other = Cluster([0.001 / speed, 0.003], [0, 0])
    assert drive(other, state, 100, 1)[0].bounds[0] is None
    state, _ = drive(other, state, 100, 15)
    assert spread(other, state.local_batch_sizes) <= 1.25


class Disturbed(Cluster):
    """Worker 0 is hindered for some steps, as by another process that comes and goes."""

    def __init__(self, *args, hindered=range(5, 10), factor=4.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.hindered, self.factor, self.step = hindered, factor, -1

    def times(self, sizes):
        self.step += 1
        slow = (np.arange(len(sizes)) == 0) & (self.step in self.hindered)
        return super().times(sizes) * np.where(slow, self.factor, 1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_disturbance_right_after_a_rise_is_forgotten_after_two_decisions(seed, steps):
    cluster = Disturbed([0.001, 0.002, 0.0033], [0] * 3, noise=0.03, seed=seed, hindered=range(5, 5 + steps))
    state, _ = drive(cluster, ControllerState((64, 64, 64)), 192, 8)
    assert held(state) == (0, 0, 0)
    assert excess(cluster, state.local_batch_sizes, (106, 53, 33)) <= 0.08


class Crowded(Cluster):
    """Larger batches take a little more than their share, as where workers share caches: that is no upper bound."""

    def times(self, sizes):
        return super().times(sizes) * (1 + 0.5 * np.asarray(sizes) / sum(sizes))


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_that_is_less_than_the_rise_teaches_no_bound(seed):
    cluster = Crowded([0.001, 0.002, 0.0033], [0] * 3, noise=0.03, seed=seed)
    state, changes = drive(cluster, ControllerState((64, 64, 64)), 192, 60, steps=8)
    assert state.bounds == (None, None, None)
    times = Crowded([0.001, 0.002, 0.0033], [0] * 3).times(state.local_batch_sizes)
    assert times.max() / times.min() <= 1.15
    assert len(changes) <= 6


@pytest.mark.parametrize(("scatter", "bound"), [(0.0, 20), (0.05, None)])
def test_a_fall_within_the_noise_teaches_no_bound(scatter, bound):
    """Worker 0 had grown from 20 to 25 samples, and has a fifth less throughput; that may be chance."""
    state = ControllerState((25, 15), previous_sizes=(20, 20), previous_throughput=(200.0, 200.0))
    for step in range(8):
        state = smooth(state, [0.15625 * (1 + scatter * (-1) ** step), 0.075])
    (learned, _) = control(state, 40, min_local=(1, 1))[0].bounds
    assert (learned and learned.size) == bound


def test_learned_bounds_never_make_the_total_impossible():
    bound = LearnedBound(40, 500.0, lifetime=20)
    state = ControllerState((50, 50), bounds=(bound, bound))
    _, sizes = control(smooth(state, [0.1, 0.3]), 100, min_local=(1, 1))
    assert sizes == (75, 25)


def test_a_learned_bound_below_a_minimum_gives_way_to_it():
    """As where the first sizes were smaller than what ranks may have."""
    state = ControllerState((4, 36), bounds=(LearnedBound(4, 40.0), None))
    _, sizes = control(smooth(state, [0.1, 0.3]), 40, min_local=(8, 1))
    assert sizes == (8, 32)
