"""Adaptive SGD (A Alg. 1, 2): batch sizes that equalise updates, weights of replicas, what rules make of them."""

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

# Algorithm 2

EQUAL = ("mean", "elastic", "crossbow")
"""Rules that give every replica the same weight; `adaptive` is A's."""


@pytest.mark.parametrize("name", MERGES)
def test_weights_are_shares(name):
    found = np.array(MERGES[name].weights((64, 32, 8), (3, 2, 4), (0.5, 2.0, 0.3), AdaptiveSettings(64)).weights)
    assert (found > 0).all()
    assert found.sum() == pytest.approx(1)


@given(workers, st.sampled_from(("adaptive", *EQUAL)), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_weights_worker_by_worker(worker, merge, renormalize, delta, threshold):
    """Shares of updates, or of batches if all did as many; regular replicas are perturbed; ties go by batch size."""
    sizes, updates, norms = worker
    settings = AdaptiveSettings(64, perturbation=delta, perturbation_threshold=threshold, renormalize=renormalize)
    found = MERGES[merge].weights(sizes, updates, norms, settings)
    shares = sizes if len(set(updates)) == 1 else updates
    expected, ranks = [share / sum(shares) for share in shares], range(len(sizes))
    if merge in EQUAL:
        expected = [1 / len(sizes)] * len(sizes)
    perturbed = merge not in EQUAL and max(norms) < threshold and len(sizes) > 1
    if perturbed:
        expected[max(ranks, key=lambda i: (updates[i], sizes[i], -i))] *= 1 + delta
        expected[min(ranks, key=lambda i: (updates[i], sizes[i], -i))] *= 1 - delta
    if perturbed and renormalize and sum(expected):
        expected = [weight / sum(expected) for weight in expected]
    assert found.perturbed == perturbed
    if sum(expected):
        np.testing.assert_allclose(found.weights, expected, rtol=1e-12)


@pytest.mark.parametrize("name", MERGES)
def test_a_replica_that_is_not_finite_is_left_out(name):
    found = MERGES[name].weights((64, 64, 64), (3, 0, 0), (np.inf, 0.01, 0.01), AdaptiveSettings(64))
    assert found.weights == (0.0, 0.5, 0.5)
    with pytest.raises(ValueError, match="every worker"):
        MERGES[name].weights((64,), (1,), (float("inf"),), AdaptiveSettings(64))


@pytest.mark.parametrize("name", MERGES)
def test_a_rule_updates_as_it_says_of_itself(name):
    """Momentum moves the global model as the last merge did; an elastic replica keeps most of its distance to it."""
    rule, (local, merged, now, before) = MERGES[name], torch.tensor([7.0, 4.0, 3.0, 1.0])
    found, own = rule.update(local, merged, GlobalModel(now, before), momentum=0.5, world_size=4)
    assert found - merged == (0.5 * (now - before) if rule.momentum else 0.0)
    assert (own is not None) is rule.elastic
    assert own is None or own - now == 0.75 * (local - now)


# Algorithm 1; that sizes settle where updates are equal: tests/simulate/test_elastic.py


@pytest.mark.parametrize(
    ("sizes", "updates", "expected"),
    [
        ((32, 32), (12, 10), (36, 28)),
        ((62, 32), (12, 10), (62, 28)),  # 66 would cross b_max: left as it is
        ((32, 10), (12, 10), (36, 10)),  # 6 would cross b_min: left as it is
        ((60, 12), (12, 10), (64, 8)),
        ((32, 32), (11, 11), (32, 32)),
        ((64, 64), (75, 25), (64, 64)),  # why sizes are damped: with the paper's beta this is never corrected
    ],
)
def test_printed_algorithm_1(sizes, updates, expected):
    assert scale_batch_sizes(sizes, updates, PRINTED) == expected


@given(workers, st.floats(0.1, 20))
def test_damped_sizes_worker_by_worker(worker, beta):
    """``b + beta (u - mean)``, but not beyond ``b u / mean``, where updates would be equal; then all grow alike."""
    sizes, updates, _ = worker
    mean, stepped = np.mean(updates), []
    for b, u in zip(sizes, updates, strict=True):
        step, equal = b + beta * (u - mean), b * u / mean
        stepped.append(min(max(min(step, equal) if u > mean else max(step, equal), 8), 64))
    expected = np.array(stepped) * 64 / max(stepped)
    found = scale_batch_sizes(sizes, updates, AdaptiveSettings(64, beta=beta))
    assert np.abs(np.array(found) - expected).max() <= 0.5 + 1e-9
    assert 8 <= min(found) <= max(found) == 64


def test_noise_does_not_shrink_the_batches_of_equal_workers(seed):
    rng, sizes, printed = np.random.default_rng(seed), (64, 64), (64, 64)
    for _ in range(300):
        updates = 20 + rng.integers(-3, 4, size=2)
        sizes = scale_batch_sizes(sizes, updates, AdaptiveSettings(64))
        printed = scale_batch_sizes(printed, np.maximum(1, updates), PRINTED)
        assert max(sizes) == 64
    assert min(printed) < 64


# hostile input


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scale_batch_sizes((8, 8), (0, 0), AdaptiveSettings(8)), "update"),
        (lambda: scale_batch_sizes((8, 8), (1,), AdaptiveSettings(8)), "updates"),
        (lambda: AdaptiveSettings(8, min_batch_size=9), "min_batch_size=9"),
        (lambda: AdaptiveSettings(8, perturbation=1.5), "perturbation=1.5"),
    ],
)
def test_what_is_out_of_range_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(("largest", "least", "beta"), [(64, 8, 4.0), (7, 1, 0.5), (1, 1, 0.5), (16, 2, 1.0)])
def test_the_papers_defaults(largest, least, beta):
    settings = AdaptiveSettings(largest)
    assert (settings.min_batch_size, settings.beta) == (least, beta)
    assert (settings.perturbation, settings.perturbation_threshold, settings.momentum) == (0.1, 0.1, 0.9)
