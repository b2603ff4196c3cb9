"""Moves and exchanges of single samples: each makes the last worker finish earlier, within the bounds."""

import numpy as np
import pytest

from lightning_hetero.core.batching.cost.exchange import improved
from lightning_hetero.core.batching.cost.problem import CutProblem
from lightning_hetero.core.batching.cost.weights import CostWeights


@pytest.mark.parametrize("name", ["cost", "padded_cost"])
def test_times_never_grow_and_each_sample_stays_once(name):
    rng = np.random.default_rng(0)
    gained = 0
    for _ in range(50):
        costs = rng.lognormal(0, 0.7, 16)
        problem = CutProblem.of(costs, [8, 4, 4], CostWeights.of(name), None, None)
        before = [list(range(8)), list(range(8, 12)), list(range(12, 16))]
        after = improved(problem, before)
        assert sorted(sum(after, [])) == list(range(16))
        assert problem.longest(after) <= problem.longest(before)
        gained += problem.longest(after) < problem.longest(before)
    assert gained > 40


def test_bounds_leave_only_exchanges():
    problem = CutProblem.of([1.0, 1.0, 2.0, 6.0, 7.0, 7.0], [3, 3], CostWeights.of("cost"), [3, 3], [3, 3])
    after = improved(problem, [[0, 1, 2], [3, 4, 5]])
    assert [len(share) for share in after] == [3, 3]
    assert problem.longest(after) < problem.longest([[0, 1, 2], [3, 4, 5]])
