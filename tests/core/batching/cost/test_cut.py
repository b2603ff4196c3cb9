"""Cuts of small batches against the exact optimum, and what holds for every cut."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lightning_hetero.core.batching.cost.cut import cut, finish_times
from lightning_hetero.core.batching.cost.problem import CutProblem
from lightning_hetero.core.batching.cost.weights import CostWeights

THETAS = {
    "cost": (0, 1, 0, 0, 0),
    "padded": (0, 0, 1, 0, 0),
    "samples_and_padded": (0.3, 0, 0.7, 0, 0),
    "attention": (0, 0, 0.7, 0, 0.3),
    "squares": (0.1, 0.5, 0, 0.4, 0),
    "all": (0.2, 0.3, 0.3, 0.1, 0.1),
}


def optimum(costs, sizes, weights, low=None, high=None):
    """The least longest time of all divisions, one by one."""
    problem = CutProblem.of(costs, sizes, weights, low, high)
    added, padding = np.array(problem.added), np.array(problem.padding)
    ways = np.array(list(itertools.product(range(len(problem.workers)), repeat=problem.number)))
    longest, allowed = np.zeros(len(ways)), np.ones(len(ways), dtype=bool)
    for k in range(len(problem.workers)):
        mine = ways == k
        count = mine.sum(axis=1)
        cost = mine @ added + count * (mine * padding).max(axis=1)
        longest = np.maximum(longest, (problem.fixed[k] + cost) / problem.span[k])
        allowed &= (count >= problem.low[k]) & (count <= problem.high[k])
    return longest[allowed].min()


@pytest.mark.parametrize("name", THETAS)
def test_cuts_are_near_the_optimum_of_small_batches(name):
    """1800 batches of all thetas together; the worst single one is at 0.85 of the optimum or better."""
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        workers = int(rng.integers(2, 4))
        number = int(rng.integers(workers + 1, 11 if workers == 2 else 8))
        costs = rng.lognormal(0, 0.7, number)
        speeds = rng.choice([1, 0.5, 0.25, 0.8], workers)
        sizes = np.maximum(1, np.round(speeds / speeds.sum() * number)).astype(int)
        weights = CostWeights(THETAS[name], (float(rng.choice([0.0, 0.3, 1.0])),) * workers)
        shares = cut(costs, sizes, weights)
        assert sorted(itertools.chain(*shares)) == list(range(number))
        found.append(optimum(costs, sizes, weights) / finish_times(costs, shares, sizes, weights).max())
    assert np.mean(found) > 0.99
    assert min(found) > 0.85
    assert max(found) < 1 + 1e-9


def test_a_worker_leaves_cheap_samples_to_the_next():
    """Both long samples belong to the fast worker, and the slow ones need one of the others each."""
    costs, sizes, weights = [0.001, 4.2, 0.0008, 0.04, 4.2, 0.04], [4, 1, 1], CostWeights(THETAS["padded"])
    shares = cut(costs, sizes, weights)
    assert sorted(shares[0]) == [1, 4]
    best = optimum(costs, sizes, weights)
    assert finish_times(costs, shares, sizes, weights).max() == pytest.approx(best)


@st.composite
def problems(draw):
    workers = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(0, 20), min_size=workers, max_size=workers).filter(any))
    number = sum(sizes)
    costs = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 10.0, 50.0]), min_size=number, max_size=number))
    low = [min(draw(st.integers(1, 3)), size) for size in sizes]
    high = [size + draw(st.integers(0, 3)) for size in sizes]
    return costs, sizes, CostWeights(draw(st.sampled_from(list(THETAS.values()))), (1.0,) * workers), low, high


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_each_sample_once_and_within_the_bounds(problem):
    costs, sizes, weights, low, high = problem
    shares = cut(costs, sizes, weights, low=low, high=high)
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    for share, size, least, most in zip(shares, sizes, low, high, strict=True):
        assert least <= len(share) <= most if size else not share


def test_equal_costs_are_cut_as_the_plan_says():
    for name in THETAS:
        shares = cut([1.0] * 12, [6, 4, 2], CostWeights(THETAS[name]))
        assert [len(share) for share in shares] == [6, 4, 2]


def test_a_fixed_time_is_not_doubled_by_a_batch_of_twice_the_cost():
    """Half of the second worker's time is fixed, so it takes more than its planned part of an expensive batch."""
    costs, sizes = [2.0] * 60, [40, 20]
    with_fixed = cut(costs, sizes, CostWeights((0, 1, 0, 0, 0), (0.0, 20.0)))
    without = cut(costs, sizes, CostWeights((0, 1, 0, 0, 0)))
    assert len(without[1]) == 20
    assert len(with_fixed[1]) == 25


def test_bounds_that_do_not_allow_the_batch_are_refused():
    with pytest.raises(ValueError, match="Change the bounds"):
        cut([1.0] * 5, [3, 2], CostWeights.of("cost"), high=[2, 2])


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_large_batches_come_close_to_a_bound_that_no_cut_beats(workers):
    rng = np.random.default_rng(workers)
    for _ in range(20):
        costs, sizes = rng.lognormal(0, 0.7, 32 * workers), [48, 16] * (workers // 2)
        weights = CostWeights.of("cost")
        bound = CutProblem.of(costs, sizes, weights, None, None).least_time()
        assert bound / finish_times(costs, cut(costs, sizes, weights), sizes, weights).max() > 0.99
