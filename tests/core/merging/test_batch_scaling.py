"""Batch-size scaling: what stays true, where it settles, and the paper's lines one by one."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.settings import AdaptiveSettings
from tests.core.merging.test_rules import PRINTED, workers


def claims(sizes, seconds_per_sample, mega_batch):
    """Updates of each worker if the one that is free first takes the next batch: an exact clock, no process."""
    free = [(0.0, i) for i in range(len(sizes))]
    updates, taken = [0] * len(sizes), 0
    while taken < mega_batch:
        now, i = heapq.heappop(free)
        batch = min(sizes[i], mega_batch - taken)
        taken, updates[i] = taken + batch, updates[i] + 1
        heapq.heappush(free, (now + batch * seconds_per_sample[i], i))
    return updates


def settle(speeds, settings, mega_batch, rounds=40):
    sizes, history = (settings.max_batch_size,) * len(speeds), []
    for _ in range(rounds):
        updates = claims(sizes, [1 / s for s in speeds], mega_batch)
        history.append((sizes, updates))
        sizes = scale_batch_sizes(sizes, updates, settings)
    return history


@pytest.mark.parametrize("batches", [12, 24, 100])
@pytest.mark.parametrize("speeds", [(1, 1 / 3), (1, 1, 1 / 3), (1, 0.5, 0.3), (1, 0.9, 0.8, 0.7), (1, 1)], ids=str)
def test_settles_where_all_do_the_same_number_of_updates(speeds, batches):
    settings = AdaptiveSettings(128)
    history = settle(speeds, settings, batches * 128)
    for _, updates in history[-5:]:
        assert max(updates) - min(updates) <= max(1, 0.05 * max(updates)), history[-5:]
    sizes = np.mean([sizes for sizes, _ in history[-10:]], axis=0)
    few = batches // len(speeds) < 6  # then updates are equal over a wide range of sizes
    np.testing.assert_allclose(sizes / sizes[0], np.array(speeds) / speeds[0], atol=0.35 if few else 0.12)


def test_a_worker_three_times_slower_takes_a_third_as_many_batches_at_first():
    _, updates = settle((1, 1 / 3), AdaptiveSettings(64), 24 * 64)[0]
    assert updates == [18, 6]


def test_the_printed_rule_stays_where_a_step_would_cross_a_bound():
    """Why sizes are damped by default: a deviation above 14 updates is never corrected with the paper's beta."""
    history = settle((1, 1 / 3), PRINTED, 100 * 64)
    assert {sizes for sizes, _ in history} == {(64, 64)}
    assert history[-1][1] == [75, 25]


@pytest.mark.parametrize(
    ("sizes", "updates", "expected"),
    [
        ((32, 32), (12, 10), (36, 28)),
        ((62, 32), (12, 10), (62, 28)),  # 66 would cross b_max: left as it is
        ((32, 10), (12, 10), (36, 10)),  # 6 would cross b_min: left as it is
        ((32, 32), (11, 11), (32, 32)),
    ],
)
def test_printed_algorithm_1(sizes, updates, expected):
    assert scale_batch_sizes(sizes, updates, PRINTED) == expected


@given(workers)
def test_printed_sizes_stay_in_bounds_and_move_towards_equal_updates(worker):
    sizes, updates, _ = worker
    for b, u, new in zip(sizes, updates, scale_batch_sizes(sizes, updates, PRINTED), strict=True):
        assert 8 <= new <= 64
        assert (new - b) * (u - np.mean(updates)) >= 0


@given(workers)
def test_damped_sizes_stay_in_bounds_with_the_largest_at_its_own(worker):
    sizes, updates, _ = worker
    sizes = [64, *sizes[1:]]
    after = scale_batch_sizes(sizes, updates, AdaptiveSettings(64))
    assert max(after) == 64
    assert min(after) >= 8
    assert scale_batch_sizes(sizes, [7] * len(sizes), AdaptiveSettings(64)) == tuple(sizes)


@given(workers)
def test_damped_sizes_worker_by_worker(worker):
    """``b + beta (u - mean)``, but not beyond ``b u / mean``, where updates would be equal; then all grow alike."""
    sizes, updates, _ = worker
    mean, stepped = np.mean(updates), []
    for b, u in zip(sizes, updates, strict=True):
        step, equal = b + 4.0 * (u - mean), b * u / mean
        stepped.append(min(max(min(step, equal) if u > mean else max(step, equal), 8), 64))
    expected = np.array(stepped) * 64 / max(stepped)
    assert np.abs(np.array(scale_batch_sizes(sizes, updates, AdaptiveSettings(64))) - expected).max() <= 0.5 + 1e-9


@given(st.integers(1, 200), st.integers(1, 200), st.integers(8, 64))
def test_a_damped_step_never_goes_beyond_equal_updates(first, second, size):
    """Two workers: the one with fewer updates gets relatively less, but not less than gives both the same number."""
    after = scale_batch_sizes((64, size), (first, second), AdaptiveSettings(64))
    before, ratio, equal = size / 64, after[1] / after[0], size / 64 * second / first
    low, high = sorted((before, equal))
    assert max(8 / 64, low) - 0.08 <= ratio <= max(8 / 64, high) * 1.07


def test_noise_does_not_shrink_the_batches_of_equal_workers():
    rng, sizes, printed = np.random.default_rng(0), (64, 64), (64, 64)
    for _ in range(300):
        updates = 20 + rng.integers(-3, 4, size=2)
        sizes = scale_batch_sizes(sizes, updates, AdaptiveSettings(64))
        printed = scale_batch_sizes(printed, np.maximum(1, updates), PRINTED)
        assert max(sizes) == 64
    assert max(printed) < 64
