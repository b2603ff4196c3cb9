"""A global batch of unequal samples is cut into shares that all workers finish together, near the exact optimum."""

import itertools

import numpy as np
import pytest

from lightning_hetero.core.batching.cost.cut import cut, finish_times
from lightning_hetero.core.batching.cost.weights import CostWeights

THETAS = {  # weights of samples, cost, padded cost, squares, padded squares
    "cost": (0, 1, 0, 0, 0),
    "padded": (0, 0, 1, 0, 0),
    "samples and padded": (0.3, 0, 0.7, 0, 0),
    "attention": (0, 0, 0.7, 0, 0.3),
    "squares": (0.1, 0.5, 0, 0.4, 0),
    "all": (0.2, 0.3, 0.3, 0.1, 0.1),
}


def seconds(costs, theta, size, fixed=0.0):
    """Time of a share relative to that of its planned work: ``(h + c) / (h + b)``, ``c`` the sum of its features."""
    x, n = np.asarray(costs, dtype=float), len(costs)
    longest = x.max() if n else 0.0
    cost = np.dot(theta, [n, x.sum(), n * longest, (x**2).sum(), n * longest**2])
    return (fixed + cost) / (fixed + size) if n else 0.0


def optimum(costs, sizes, theta, fixed):
    """The least longest time of all divisions in which every worker takes a sample."""
    best = np.inf
    for ways in itertools.product(range(len(sizes)), repeat=len(costs)):
        shares = [[c for c, way in zip(costs, ways, strict=True) if way == k] for k in range(len(sizes))]
        if all(shares):
            best = min(best, max(seconds(s, theta, b, fixed) for s, b in zip(shares, sizes, strict=True)))
    return best


@pytest.mark.parametrize("name", THETAS)
def test_small_batches_are_cut_near_the_optimum_of_all_divisions(name):
    rng, found, theta = np.random.default_rng(0), [], THETAS[name]
    for _ in range(25):
        workers = int(rng.integers(2, 4))
        number = int(rng.integers(workers + 1, 8 if workers == 2 else 6))
        costs, speeds = rng.lognormal(0, 0.7, number), rng.choice([1, 0.5, 0.25, 0.8], workers)
        sizes = np.maximum(1, np.round(speeds / speeds.sum() * number)).astype(int)
        fixed = float(rng.choice([0.0, 0.3, 1.0]))
        weights = CostWeights(theta, (fixed,) * workers)
        shares = cut(costs, sizes, weights)
        assert sorted(itertools.chain(*shares)) == list(range(number))
        times = [seconds(costs[share], theta, b, fixed) for share, b in zip(shares, sizes, strict=True)]
        assert finish_times(costs, shares, sizes, weights) == pytest.approx(times)
        found.append(optimum(costs, sizes, theta, fixed) / max(times))
    assert np.mean(found) > 0.99
    assert min(found) > 0.85
    assert max(found) < 1 + 1e-9


@pytest.mark.parametrize("name", THETAS)
def test_each_sample_is_in_one_share_within_the_bounds(name, seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        sizes = rng.integers(0, 20, rng.integers(1, 9))
        sizes[0] += not sizes.any()
        costs = rng.choice([1.0, 2.0, 3.0, 10.0, 50.0], sizes.sum())
        low, high = np.minimum(rng.integers(1, 4, len(sizes)), sizes), sizes + rng.integers(0, 4, len(sizes))
        bounds = {"low": low.tolist(), "high": high.tolist()}
        shares = cut(costs, sizes.tolist(), CostWeights(THETAS[name], (1.0,) * len(sizes)), **bounds)
        assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
        for share, size, least, most in zip(shares, sizes, low, high, strict=True):
            assert least <= len(share) <= most if size else not share


def test_large_batches_come_close_to_a_bound_that_no_cut_beats():
    rng, weights, sizes = np.random.default_rng(0), CostWeights(THETAS["cost"]), [48, 16] * 4
    for _ in range(10):
        costs = rng.lognormal(0, 0.7, 256)
        times = finish_times(costs, cut(costs, sizes, weights), sizes, weights)
        assert 0.99 < max(costs.sum() / sum(sizes), costs.max() / 48) / times.max() < 1 + 1e-9


def test_cuts_in_figures():
    for name, theta in THETAS.items():
        assert [len(share) for share in cut([1.0] * 12, [6, 4, 2], CostWeights(theta))] == [6, 4, 2], name
    # half of the second worker's time is fixed: a batch of twice the cost does not double that
    weights = [CostWeights(THETAS["cost"], fixed) for fixed in ((), (0.0, 20.0))]
    assert [len(cut([2.0] * 60, [40, 20], one)[1]) for one in weights] == [20, 25]
    # bounds leave only exchanges
    costs = [1.0, 1.0, 2.0, 6.0, 7.0, 7.0]
    shares = cut(costs, [3, 3], CostWeights(THETAS["cost"]), low=[3, 3], high=[3, 3])
    assert sorted(sum(costs[i] for i in share) for share in shares) == [10.0, 14.0]


def test_bounds_that_do_not_allow_the_batch_are_refused():
    for bounds in ({"high": [2, 2]}, {"low": [3, 3]}):
        with pytest.raises(ValueError, match="bounds"):
            cut([1.0] * 5, [3, 2], CostWeights.of("cost"), **bounds)


def test_weights_come_back_from_a_checkpoint_and_say_what_pads():
    weights = CostWeights(np.array(THETAS["attention"]), [2, 1])
    assert CostWeights.from_state_dict(weights.state_dict()) == weights
    assert [CostWeights.of(name).pads for name in ("samples", "cost", "padded_cost")] == [False, False, True]
    assert [CostWeights(theta).pads for theta in THETAS.values()] == [False, True, True, True, False, True]
