"""A batch to be cut: its samples in order, the cost of a share, a bound of the time."""

import pytest

from lightning_hetero.core.batching.cost.problem import CutProblem
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.timing.cost.features import share_features


def test_the_cost_of_a_share_is_that_of_its_features():
    theta, costs = (0.1, 0.2, 0.3, 0.4, 0.5), [3.0, 1.0, 2.0]
    problem = CutProblem.of(costs, [2, 1], CostWeights(theta), None, None)
    assert problem.positions == [1, 2, 0]
    for share in ([0], [0, 2], [0, 1, 2]):
        features = share_features([costs[problem.positions[i]] for i in share])
        assert problem.cost(share) == pytest.approx(sum(t * f for t, f in zip(theta, features, strict=True)))


def test_no_time_is_below_that_of_the_longest_sample():
    problem = CutProblem.of([1.0, 20.0], [1, 3], CostWeights.of("cost"), None, None)
    assert problem.least_time() == pytest.approx(20.0 / 3.0)
