"""Weights of the cost of a share: what is allowed, and the plan that carries them."""

import pytest

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory

LEARNED = CostWeights((0.1, 0.0, 0.9, 0.0, 0.0), (2.0, 1.0))


@pytest.mark.parametrize(
    ("theta", "error"), [((0.0,) * 5, ValueError), ((1.0,), ValueError), ((-1.0, 1, 0, 0, 0), ValueError)]
)
def test_bad_weights_are_refused(theta, error):
    with pytest.raises(error):
        CostWeights(theta)


def test_a_plan_carries_its_weights_through_a_checkpoint():
    plan = BatchPlan(8, (6, 2), cost=LEARNED)
    assert BatchPlan.from_state_dict(plan.state_dict()) == plan
    assert "cost" not in BatchPlan(8, (6, 2)).state_dict(), "plans without them are those of earlier versions"


def test_ranks_with_other_weights_hold_another_plan():
    digests = {
        PlanHistory((PlanEntry(0, 0, BatchPlan(8, (6, 2), cost=cost)),)).digest()
        for cost in (None, LEARNED, CostWeights.of("cost"))
    }
    assert len(digests) == 3


def test_only_padding_makes_sorting_pay():
    assert [CostWeights.of(name).pads for name in ("samples", "cost", "padded_cost")] == [False, False, True]
