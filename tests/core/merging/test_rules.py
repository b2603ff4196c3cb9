"""Batch-size scaling and merge weights: what stays true, where it settles, and the paper's lines one by one."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES, GlobalModel
from lightning_hetero.core.merging.settings import AdaptiveSettings

PRINTED = AdaptiveSettings(64, damped=False, renormalize=False)


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


workers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(8, 64), min_size=n, max_size=n),
        st.lists(st.integers(0, 200), min_size=n, max_size=n).filter(sum),
        st.lists(st.floats(0, 1), min_size=n, max_size=n),
    )
)


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


@given(workers, st.sampled_from(sorted(MERGES)), st.booleans())
def test_weights_sum_to_one_but_for_the_perturbation(worker, merge, renormalize):
    sizes, updates, norms = worker
    found = MERGES[merge].weights(sizes, updates, norms, AdaptiveSettings(64, renormalize=renormalize))
    assert all(weight >= 0 for weight in found.weights)
    assert abs(sum(found.weights) - 1) <= (1e-12 if renormalize or not found.perturbed else 0.1 + 1e-12)
    assert found.perturbed == (merge == "adaptive" and len(sizes) > 1 and max(norms) < 0.1)


@given(workers, st.floats(0, 1))
def test_printed_weights_worker_by_worker(worker, delta):
    sizes, updates, norms = worker
    settings = AdaptiveSettings(64, perturbation=delta, renormalize=False)
    shares = sizes if len(set(updates)) == 1 else updates
    expected, ranks = [share / sum(shares) for share in shares], range(len(sizes))
    if max(norms) < settings.perturbation_threshold and len(sizes) > 1:
        expected[max(ranks, key=lambda i: (updates[i], sizes[i], -i))] *= 1 + delta
        expected[min(ranks, key=lambda i: (updates[i], sizes[i], -i))] *= 1 - delta
    found = MERGES["adaptive"].weights(sizes, updates, norms, settings)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-12)


def test_printed_algorithm_2():
    settings, rule = PRINTED, MERGES["adaptive"]
    irregular = rule.weights((64, 64, 64), (5, 3, 2), (0.01, 0.2, 0.01), settings)
    assert (irregular.weights, irregular.perturbed) == ((0.5, 0.3, 0.2), False)
    regular = rule.weights((64, 64, 64), (5, 3, 2), (0.01, 0.01, 0.01), settings)
    np.testing.assert_allclose(regular.weights, (0.55, 0.3, 0.18))
    normal = rule.weights((64, 64, 64), (5, 3, 2), (0.01,) * 3, AdaptiveSettings(64))
    np.testing.assert_allclose(normal.weights, np.array((0.55, 0.3, 0.18)) / 1.03)


def test_equal_updates_weigh_by_batch_size_which_breaks_the_tie_of_the_perturbation():
    found = MERGES["adaptive"].weights((16, 48), (4, 4), (0.01, 0.01), PRINTED)
    np.testing.assert_allclose(found.weights, (0.25 * 0.9, 0.75 * 1.1))


def test_a_replica_that_is_not_finite_is_left_out():
    for rule in MERGES.values():
        found = rule.weights((64, 64, 64), (3, 3, 3), (0.01, float("nan"), 0.01), AdaptiveSettings(64))
        assert found.weights == (0.5, 0.0, 0.5)
        with pytest.raises(ValueError, match="diverged on every worker"):
            rule.weights((64,), (1,), (float("inf"),), AdaptiveSettings(64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_batch_size": 8, "min_batch_size": 9}, "min_batch_size=9 is above"),
        ({"max_batch_size": 8, "beta": 0.0}, "beta=0.0"),
        ({"max_batch_size": 8, "momentum": 1.0}, "momentum=1.0"),
        ({"max_batch_size": 8, "perturbation": 1.5}, "perturbation=1.5"),
        ({"max_batch_size": 8, "perturbation_threshold": -1}, "perturbation_threshold=-1"),
        ({"max_batch_size": 8, "damped": "no"}, "damped='no'"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveSettings(**arguments)


def test_bad_observations():
    with pytest.raises(ValueError, match="no worker did an update"):
        scale_batch_sizes((8, 8), (0, 0), AdaptiveSettings(8))
    with pytest.raises(ValueError, match="entries for 2 workers"):
        scale_batch_sizes((8, 8), (1,), AdaptiveSettings(8))
    with pytest.raises(ValueError, match="entries for 2 workers"):
        MERGES["mean"].weights((8, 8), (1, 1), (0.1,), AdaptiveSettings(8))


@pytest.mark.parametrize("name", MERGES)
def test_a_rule_updates_as_it_says_of_itself(name):
    """Momentum moves the global model as the last merge did; an elastic replica keeps most of its distance to it."""
    rule, (local, merged, now, before) = MERGES[name], torch.tensor([7.0, 4.0, 3.0, 1.0])
    given = {"momentum": 0.5, "world_size": 4}
    found, own = rule.update(local, merged, GlobalModel(now, before), **given)
    still, _ = rule.update(local, merged, GlobalModel(now, now), **given)
    assert still == merged
    assert found - merged == (0.5 * (now - before) if rule.momentum else 0.0)
    assert (own is not None) is rule.elastic
    if own is not None:
        assert own - now == 0.75 * (local - now)


@pytest.mark.parametrize("name", MERGES)
def test_only_the_rule_that_scales_weighs_by_updates(name):
    found = MERGES[name].weights((64, 32, 16), (5, 3, 2), (0.5, 0.5, 0.5), AdaptiveSettings(64))
    np.testing.assert_allclose(found.weights, (0.5, 0.3, 0.2) if MERGES[name].scales else (1 / 3,) * 3)
