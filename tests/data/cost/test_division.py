"""Division by cost in a sampler: the same global batches, each index once, shares that take equally long."""

import numpy as np
import pytest

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.data import PermutationStream, UnevenBatchSampler
from lightning_hetero.data.cost.division import CostDivision

COSTS = np.random.default_rng(0).lognormal(4, 0.8, 203)


def samplers(history, ranks, division, **kwargs):
    stream = PermutationStream(len(COSTS), shuffle=True, seed=1)
    return [UnevenBatchSampler(stream, lambda: history, rank, division=division, **kwargs) for rank in range(ranks)]


def steps(parts):
    return list(zip(*(list(part) for part in parts), strict=True))


@pytest.mark.parametrize("sizes", [(16, 16), (24, 8), (16, 8, 4, 4)])
@pytest.mark.parametrize("first", ["cost", "padded_cost"])
def test_global_batches_stay_and_shares_take_equally_long(sizes, first):
    history = PlanHistory((PlanEntry(0, 0, BatchPlan(32, sizes)),))
    division = CostDivision(COSTS, CostWeights.of(first))
    by_cost, by_count = (steps(samplers(history, len(sizes), one)) for one in (division, None))
    assert [set().union(*shares) for shares in by_cost] == [set().union(*shares) for shares in by_count]
    assert sorted(i for shares in by_cost for share in shares for i in share) == list(range(len(COSTS)))

    def imbalance(all_shares):
        def cost(share):
            own = COSTS[share]
            return own.sum() if first == "cost" else len(own) * own.max()

        times = [[cost(share) / size for share, size in zip(s, sizes, strict=True)] for s in all_shares[:-1]]
        return float(np.mean([max(t) / np.mean(t) for t in times])), float(np.mean([max(t) for t in times]))

    even, longest = imbalance(by_cost)
    assert even < 0.2 + 0.8 * imbalance(by_count)[0]
    assert longest < (1.0 if first == "cost" else 0.85) * imbalance(by_count)[1]


@pytest.mark.parametrize("new", [2, 3])
def test_a_resumed_epoch_goes_on_in_the_same_global_batches(new):
    old = PlanHistory((PlanEntry(0, 0, BatchPlan(24, (16, 8))),))
    division = CostDivision(COSTS, CostWeights.of("cost"))
    whole = steps(samplers(old, 2, division))
    sizes = {2: (20, 4), 3: (12, 8, 4)}[new]
    resumed = old.extended(PlanEntry(0, 3, BatchPlan(24, sizes)))
    rest = steps(samplers(resumed, new, division, start=(0, 3)))
    assert [set().union(*shares) for shares in rest] == [set().union(*shares) for shares in whole[3:]]
    assert all(sum(map(len, shares)) == sum(map(len, before)) for shares, before in zip(rest, whole[3:], strict=True))


def test_memory_and_smallest_batches_are_kept():
    history = PlanHistory((PlanEntry(0, 0, BatchPlan(32, (16, 16))),))
    division = CostDivision(COSTS, CostWeights.of("cost"), min_local=14, max_local=(17, 18))
    for first, second in steps(samplers(history, 2, division))[:-1]:
        assert 14 <= len(first) <= 17
        assert 14 <= len(second) <= 18


@pytest.mark.parametrize("first", ["cost", "padded_cost"])
@pytest.mark.parametrize("least", [1, 4, 8])
def test_a_share_of_one_dear_sample_has_the_fewest_samples_that_a_rank_can_run(first, least):
    costs = np.array([100.0, *[1.0] * 15])
    division = CostDivision(costs, CostWeights.of(first), min_local=least)
    sizes = sorted(map(len, division.divide(range(16), (8, 8), BatchPlan(16, (8, 8))).indices))
    assert sizes == [least, 16 - least]


def test_what_ranks_compare_has_the_first_weights_and_the_bounds():
    others = [
        CostDivision(COSTS, CostWeights.of("padded_cost")),
        CostDivision(COSTS, CostWeights.of("cost"), min_local=2),
        CostDivision(COSTS, CostWeights.of("cost"), max_local=(40, 40)),
        CostDivision(COSTS, CostWeights.of("cost")),
    ]
    assert len({division.fingerprint() for division in others}) == 4


def test_weights_of_the_plan_divide_from_its_first_step_on():
    padded = CostWeights.of("padded_cost")
    entries = PlanEntry(0, 0, BatchPlan(32, (16, 16))), PlanEntry(0, 2, BatchPlan(32, (16, 16), cost=padded))
    mixed = steps(samplers(PlanHistory(entries), 2, CostDivision(COSTS, CostWeights.of("cost"))))
    before = steps(samplers(PlanHistory(entries[:1]), 2, CostDivision(COSTS, CostWeights.of("cost"))))
    after = steps(samplers(PlanHistory(entries[:1]), 2, CostDivision(COSTS, padded)))
    assert mixed == before[:2] + after[2:]
    assert before[2:] != after[2:]


def test_costs_count_by_their_ratios_and_ranks_can_compare_them():
    first, same, other = (CostDivision(costs, CostWeights.of("cost")) for costs in (COSTS, COSTS * 4, COSTS + 1))
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()
