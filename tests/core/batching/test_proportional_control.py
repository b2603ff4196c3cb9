"""The proportional controller against its paper's formula and against simulated clusters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.batching.integer_split import even_sizes, proportional_sizes
from lightning_hetero.core.batching.proportional_control import ControllerState, control, smooth
from tests.core.batching.paper_controller import PaperController
from tests.quota import QuotaCluster

moderate = settings(max_examples=100, deadline=None, derandomize=True)


class Cluster:
    """Workers whose compute time is a line in their batch size, with multiplicative noise."""

    def __init__(self, slopes, offsets, noise=0.0, seed=0):
        self.slopes, self.offsets = np.asarray(slopes, float), np.asarray(offsets, float)
        self.noise, self.rng = noise, np.random.default_rng(seed)

    def times(self, sizes):
        exact = self.slopes * np.asarray(sizes) + self.offsets
        return exact * np.maximum(1 + self.noise * self.rng.standard_normal(len(exact)), 0.1)


def drive(cluster, state, total, decisions, *, steps=5, **bounds):
    """Run the loop; returns the last state and the decisions at which sizes changed."""
    bounds = {"min_local": (1,) * len(state.local_batch_sizes), **bounds}
    changes = []
    for decision in range(decisions):
        for _ in range(steps):
            state = smooth(state, cluster.times(state.local_batch_sizes))
        state, sizes = control(state, total, **bounds)
        assert sum(state.local_batch_sizes) == total
        if sizes is not None:
            assert sizes == state.local_batch_sizes
            changes.append(decision)
    return state, changes


def spread(cluster, sizes):
    times = cluster.slopes * np.asarray(sizes) + cluster.offsets
    return times.max() / times.min()


@moderate
@given(st.lists(st.tuples(st.integers(50, 400), st.floats(0.5, 1.5)), min_size=2, max_size=6))
def test_one_step_is_equations_4_and_5(workers):
    sizes, times = (np.array(column) for column in zip(*workers, strict=True))
    error = times - times.mean()
    paper = sizes + -(sizes / times) * error  # eq. 4 and 5, which do not keep the sum
    expected = paper * sizes.sum() / paper.sum()
    state = smooth(ControllerState(tuple(int(b) for b in sizes)), times)
    _, new = control(state, int(sizes.sum()), min_local=(1,) * len(sizes), dead_band=0.0)
    assert np.abs(np.array(state.local_batch_sizes if new is None else new) - expected).max() <= 1


def test_proportions_hold_where_one_worker_is_a_thousand_times_faster():
    """The rule's sizes are then far below 1 before they are brought to the total; none of them may be cut off."""
    state = smooth(ControllerState((10, 1, 33)), (0.00014, 64.0, 0.55))
    assert control(state, 44, min_local=(2, 1, 5), max_local=(20, 60, 33))[1] == (20, 1, 23)


def test_one_step_in_figures():
    # mean 0.2: 40 - 40/0.1 (0.1 - 0.2) = 80 and 40 - 40/0.3 (0.3 - 0.2) = 26.7, of 106.7; scaled to 80: 60 and 20
    state = smooth(ControllerState((40, 40)), [0.1, 0.3])
    assert control(state, 80, min_local=(1, 1))[1] == (60, 20)


@settings(moderate, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.001, 0.02), st.floats(0, 0.05)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_compute_times_become_equal_within_the_dead_band(workers, seed):
    cluster = Cluster(*zip(*workers, strict=True), seed=seed)
    n = len(workers)
    total = 400 * n
    state, changes = drive(cluster, ControllerState(even_sizes(total, n)), total, 25)
    rounding = 1 + 1 / min(state.local_batch_sizes)
    assert spread(cluster, state.local_batch_sizes) <= 1.05 / 0.95 * rounding**2
    assert all(decision < 15 for decision in changes)


def test_fixed_times_are_converged_to_in_a_few_changes():
    cluster = Cluster([0.001, 0.002, 0.008], [0.05, 0.01, 0.03])
    state, changes = drive(cluster, ControllerState((100, 100, 100)), 300, 30)
    assert spread(cluster, state.local_batch_sizes) < 1.1
    assert len(changes) <= 5


@pytest.mark.parametrize("seed", range(10))
def test_noise_causes_no_oscillation(seed):
    cluster = Cluster([0.001, 0.002, 0.004, 0.006], [0.01, 0.0, 0.02, 0.0], noise=0.03, seed=seed)
    state, changes = drive(cluster, ControllerState(even_sizes(512, 4)), 512, 200, steps=10)
    assert len(changes) <= 6
    assert spread(cluster, state.local_batch_sizes) < 1.2


@pytest.mark.parametrize("seed", range(5))
def test_equal_workers_are_left_alone_under_noise(seed):
    cluster = Cluster([0.002] * 4, [0.01] * 4, noise=0.03, seed=seed)
    _, changes = drive(cluster, ControllerState(even_sizes(256, 4)), 256, 100, steps=10)
    assert len(changes) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_swapped_speeds_are_followed_in_a_few_changes(seed):
    before = Cluster([0.001, 0.004], [0.01, 0.01], noise=0.02, seed=seed)
    after = Cluster([0.004, 0.001], [0.01, 0.01], noise=0.02, seed=seed + 1)
    state, _ = drive(before, ControllerState((100, 100)), 200, 10)
    state, changes = drive(after, state, 200, 10)
    assert spread(after, state.local_batch_sizes) < 1.2
    assert 1 <= len(changes) <= 5
    assert changes[0] <= 1


@settings(moderate, max_examples=60)
@given(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=6), st.data(), st.floats(0, 0.2), st.integers(0, 2**16))
def test_bounds_and_total_are_always_kept(slopes, data, noise, seed):
    n = len(slopes)
    low = tuple(data.draw(st.integers(1, 20)) for _ in slopes)
    high = tuple(b + data.draw(st.integers(0, 60)) for b in low)
    total = data.draw(st.integers(sum(low), sum(high)))
    cluster, state = Cluster(slopes, [0.01] * n, noise, seed), ControllerState(even_sizes(total, n))
    for _ in range(8):
        state = smooth(state, cluster.times(state.local_batch_sizes))
        state, sizes = control(state, total, min_local=low, max_local=high)
        if sizes is not None:
            assert sum(sizes) == total
            assert all(a <= b <= c for a, b, c in zip(low, sizes, high, strict=True))


def test_all_sizes_change_or_none():
    state = smooth(ControllerState((100, 100, 100)), [1.0, 1.02, 0.98])
    same, sizes = control(state, 300, min_local=(1, 1, 1))
    assert sizes is None
    assert same.local_batch_sizes == (100, 100, 100)
    assert same.times == state.times  # the moving average goes on
    changed, sizes = control(state, 300, min_local=(1, 1, 1), dead_band=0.01)
    assert sizes == (100, 98, 102)
    assert changed.times.smoothed == ()  # and starts afresh at new sizes


def test_smoothing_is_a_mean_first_and_an_exponential_moving_average_then():
    state = ControllerState((8, 8))
    for times in ([1.0, 4.0], [2.0, 4.0], [3.0, 4.0]):
        state = smooth(state, times, decay=0.7)
    assert state.times.smoothed == pytest.approx((2.0, 4.0))
    assert smooth(state, [6.0, 4.0], decay=0.7).times.smoothed == pytest.approx((0.7 * 2.0 + 0.3 * 6.0, 4.0))


def test_the_size_that_has_to_change_is_the_one_whose_time_tells():
    """Worker 0 would change by a quarter and is all noise; the time of worker 1 tells, and it would change by 4 %."""
    state = ControllerState((20,) + (100,) * 8)
    for step in range(8):
        times = [0.25 * (1 + 0.07 * (-1) ** step), 0.208, 0.192, *(0.2,) * 6]
        state = smooth(state, times)
    state, sizes = control(state, 820, min_local=(1,) * 9)
    assert sizes is None
    assert state.kept.startswith("differences are within the noise")


@pytest.mark.parametrize(("scatter", "gain"), [(0.02, 1.0), (0.0, 0.5)])
def test_a_turn_within_the_noise_shortens_no_step(scatter, gain):
    """Worker 2 had grown and is 3 ms above the mean now; the others change in either case."""
    state = ControllerState((40, 40, 40), moves=(10, -15, 5), gains=(1.0, 1.0, 1.0))
    for step in range(20):
        state = smooth(state, [0.1, 0.3, 0.205 + scatter * (-1) ** step])
    state, sizes = control(state, 120, min_local=(1, 1, 1))
    assert sizes is not None
    assert state.gains == (1.0, 1.0, gain)


@pytest.mark.parametrize("seed", range(4))
def test_times_that_rise_faster_than_sizes_cause_no_swing(seed):
    """A quota that nobody knows of: below its share a worker bursts at full speed, above it waits for whole periods.

    With the whole step in each decision sizes swing for ever, at times between 43 and 71 samples for the slowest.
    """
    cluster, state, seen = QuotaCluster(seed=seed, corrected=False), ControllerState((64, 64, 64)), []
    for _ in range(25):
        for times in cluster.steps(state.local_batch_sizes, 8).compute[1:]:
            state = smooth(state, times)
        state, _ = control(state, 192, min_local=(1, 1, 1))
        seen.append(state.local_batch_sizes)
    times = [QuotaCluster().step_time(sizes, 100) for sizes in seen[-8:]]
    assert np.mean(times) <= 1.25 * QuotaCluster().step_time((109, 53, 30))


PINNED = [  # speeds, total, minimum: the slowest worker takes longer than all others even with its minimum
    ((1, 0.5, 0.1), 192, 30),
    ((1, 0.5, 0.2), 192, 30),
    ((1, 0.6, 0.1), 126, 16),
    ((1, 0.8, 0.6, 0.05), 128, 8),
    ((1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.02), 512, 4),
]


@pytest.mark.parametrize(("speeds", "total", "least"), PINNED)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_worker_held_at_its_minimum_lets_the_others_settle(speeds, total, least, noise):
    """Its time stays above the mean whatever the others do: with it in the mean, they are never done."""
    cluster, low = Cluster(1 / np.array(speeds), [0] * len(speeds), noise), (least,) * len(speeds)
    state, changes = drive(cluster, ControllerState(even_sizes(total, len(speeds))), total, 300, min_local=low)
    assert len(changes) <= 3
    assert state.local_batch_sizes[-1] == least
    free = [b / speed for b, speed in zip(state.local_batch_sizes, speeds, strict=True) if b > least]
    assert max(free) / min(free) <= (1.1 + noise) * (1 + 1 / min(b for b in state.local_batch_sizes if b > least))


def random_shape(seed):
    """Speeds, total, minimum and maximum of each worker, with some of them held by a bound."""
    rng = np.random.default_rng(seed)
    workers, least = int(rng.integers(2, 7)), int(rng.integers(1, 33))
    total = int(rng.integers(workers * least + 1, 6 * workers * max(least, 8)))
    most = np.maximum(rng.integers(least, int(0.7 * total) + 2, workers), least)
    most += max(total - int(most.sum()), 0) // workers + 1
    speeds = np.exp(0.9 * rng.standard_normal(workers))
    return speeds, total, (least,) * workers, None if seed % 2 else tuple(int(b) for b in most)


@pytest.mark.parametrize("seed", range(30))
def test_random_shapes_and_bounds_settle_within_three_changes(seed):
    speeds, total, low, high = random_shape(seed)
    first = proportional_sizes(total, [1.0] * len(speeds), min_local=low, max_local=high)
    cluster = Cluster(1 / speeds, [0] * len(speeds))
    state, changes = drive(cluster, ControllerState(first), total, 300, steps=2, min_local=low, max_local=high)
    assert len(changes) <= 3
    best = proportional_sizes(total, speeds, min_local=low, max_local=high)
    reached, least = (max(np.array(sizes) / speeds) for sizes in (state.local_batch_sizes, best))
    assert reached <= 1.05 * least + 1 / min(speeds)  # the dead band, and a sample of the slowest


@pytest.mark.parametrize("seed", range(10))
def test_a_share_of_time_that_no_size_changes_makes_no_size_swing(seed):
    speeds, total, low, high = random_shape(seed)
    first = proportional_sizes(total, [1.0] * len(speeds), min_local=low, max_local=high)
    cluster = Cluster(1 / speeds, [0.5 * total / speeds.sum()] * len(speeds))
    _, changes = drive(cluster, ControllerState(first), total, 100, steps=2, min_local=low, max_local=high)
    assert len(changes) <= 5
    assert all(decision < 10 for decision in changes)


def waiting(cluster, sizes):
    """Share of its time that the mean worker waits for the slowest."""
    times = cluster.slopes * np.asarray(sizes) + cluster.offsets
    return times.max() / times.mean() - 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speeds", [(1, 0.5, 0.3), (17, 20, 2), (1, 1, 1)])
def test_dead_band_knows_the_noise(speeds, seed):
    """At 15 % the moving average scatters by 3.4 %, more than a dead band of 5 % stops in three workers for long."""
    slopes = 1 / np.array(speeds)
    ours, changes, waits = ControllerState((64, 64, 64)), 0, []
    paper, paper_changes, paper_waits = PaperController([64, 64, 64], every=10), 0, []
    cluster, same = Cluster(slopes, [0] * 3, 0.15, seed), Cluster(slopes, [0] * 3, 0.15, seed)
    for decision in range(300):
        for _ in range(10):
            ours = smooth(ours, cluster.times(ours.local_batch_sizes))
            paper_changes += paper.step(same.times(paper.sizes))
        ours, sizes = control(ours, 192, min_local=(1, 1, 1))
        changes += sizes is not None
        if decision >= 30:
            waits.append(waiting(cluster, ours.local_batch_sizes))
            paper_waits.append(waiting(cluster, paper.sizes))
    assert changes <= 6 < paper_changes
    assert np.mean(waits) <= min(0.03, np.mean(paper_waits))


def test_paper_controller_is_the_printed_one():
    """The paper's figures: one step gives ``b mean(t) / t``, within 5 % nothing changes, a drop teaches a bound."""
    paper = PaperController([40, 40])
    assert paper.step(np.array([0.1, 0.3]))
    assert paper.sizes.tolist() == [80, 27]  # 40 * 0.2 / 0.1 and 40 * 0.2 / 0.3
    assert not paper.step(np.array([0.2, 0.205]))
    assert paper.high.tolist() == [np.inf, np.inf]
    paper.step(np.array([5.0, 0.2]))  # now worker 0 is slower than it was with 40
    falls = PaperController([40, 40])
    falls.step(np.array([0.1, 0.3]))
    falls.step(np.array([1.0, 0.2]))
    assert falls.high.tolist() == [40, np.inf]
