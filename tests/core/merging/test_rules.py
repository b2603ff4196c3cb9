"""Merge rules: weights by the paper's lines, one by one, and what each rule makes of the replicas."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.merging.batch_scaling import scale_batch_sizes
from lightning_hetero.core.merging.rules import MERGES, GlobalModel
from lightning_hetero.core.merging.settings import AdaptiveSettings

PRINTED = AdaptiveSettings(64, damped=False, renormalize=False)


workers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(8, 64), min_size=n, max_size=n),
        st.lists(st.integers(0, 200), min_size=n, max_size=n).filter(sum),
        st.lists(st.floats(0, 1), min_size=n, max_size=n),
    )
)


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
