"""Costs of samples, read without loading them or given by a function, and global batches divided by them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.data import PermutationStream, UnevenBatchSampler
from lightning_hetero.data.cost.costs import check_costs, computed_costs, known_lengths
from lightning_hetero.data.cost.division import CostDivision

datasets = pytest.importorskip("datasets")
table = datasets.Dataset.from_dict
TOKENS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
LENGTHS = [3.0, 1.0, 2.0, 4.0]


class Costly(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise RuntimeError("no sample may be loaded for its length")


class Raises(Costly):
    lengths = property(lambda self: 1 / 0)


KNOWN = {
    "input_ids": table({"input_ids": TOKENS, "labels": [0, 1, 0, 1]}),
    "length": table({"text": list("abcd"), "length": [3, 1, 2, 4]}),
    "selected": table({"input_ids": TOKENS[::-1]}).select([3, 2, 1, 0]),
    "dicts": [{"input_ids": tokens} for tokens in TOKENS],
    "attribute": Costly(lengths=np.array([3, 1, 2, 4])),
    "subset": Subset([{"input_ids": tokens} for tokens in [*TOKENS[::-1], [1] * 9]], [3, 2, 1, 0]),
    "text": table({"length": list("abcd"), "input_ids": TOKENS}),
    "null": table({"length": [3, None, 2, 4], "input_ids": TOKENS}),
    "tensors": [{"attention_mask": 1, "labels": torch.zeros(len(tokens))} for tokens in TOKENS],
}
UNKNOWN = {
    "costly": Costly(),
    "columns": table({"pixels": [[1.0]]}),
    "dicts": [{"input": "text"}],
    "nulls": table({"input_ids": [[1], None]}),
    "scalars": [{"labels": torch.tensor(1)}, {"labels": torch.tensor(0)}],
    "mixed": [{"input_ids": [1]}, {"labels": [1]}],
    "ragged": Costly(lengths=[[1], [2, 3], [4], [5]]),
    "raises": Raises(),
    "complex": Costly(lengths=np.array([1j, 2j, 3j, 4j])),
    "huge": [{"length": 10**400}],
}


@pytest.mark.parametrize("name", KNOWN)
def test_lengths_are_known(name):
    assert known_lengths(KNOWN[name]).tolist() == LENGTHS


@pytest.mark.parametrize("name", UNKNOWN)
def test_lengths_are_unknown_and_nothing_is_loaded(name):
    assert known_lengths(UNKNOWN[name]) is None


def test_a_function_gets_the_sample_or_the_index_and_leaves_random_numbers_alone():
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def state(seed):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    assert computed_costs(len, TOKENS, [0, 3]) == [3.0, 4.0]
    assert computed_costs(lambda index: index + 0.5, Costly(), [0, 3]) == [0.5, 3.5]
    state(7)
    expected = draws()
    state(7)
    computed_costs(lambda index: sum(draws()), None, range(3))
    assert draws() == expected


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_that_divide_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="cost_fn.* sample 1 "):
        check_costs(np.array([1.0, bad]), 2, "cost_fn")
    with pytest.raises(ValueError, match="cost_fn"):
        check_costs(np.ones(3), 2, "cost_fn")


COSTS = np.random.default_rng(0).lognormal(4, 0.8, 203)
SUM, PADDED = CostWeights.of("cost"), CostWeights.of("padded_cost")


def plan(sizes, **kwargs):
    return BatchPlan(sum(sizes), sizes, **kwargs)


def steps(division, *entries):
    """Samples of each rank in each step."""
    history = PlanHistory(tuple(PlanEntry(0, step, one) for step, one in entries))
    stream, ranks = PermutationStream(len(COSTS), shuffle=True, seed=1), range(entries[0][1].world_size)
    parts = [UnevenBatchSampler(stream, lambda: history, rank, division=division) for rank in ranks]
    taken = list(zip(*(list(part) for part in parts), strict=True))
    for number, shares in enumerate(taken):
        for rank, part in enumerate(parts):
            share = part.step_at(0, number)
            assert share.sizes == tuple(map(len, shares))
            assert share.planned == history.sizes_at(0, number, len(COSTS))[rank]
            assert share.regular is (number < len(taken) - 1)
            assert len(share.work) == division.features
    return taken


def test_weights_of_a_plan_divide_from_its_first_step_on():
    division, sizes = CostDivision(COSTS, SUM), (16, 16)
    mixed = steps(division, (0, plan(sizes)), (2, plan(sizes, cost=PADDED)))
    before, after = (steps(CostDivision(COSTS, weights), (0, plan(sizes))) for weights in (SUM, PADDED))
    assert mixed == before[:2] + after[2:]
    assert before[2:] != after[2:]


@pytest.mark.parametrize("weights", [SUM, PADDED])
def test_memory_and_smallest_batches_are_kept(weights):
    division = CostDivision(COSTS, weights, min_local=14, max_local=(17, 18))
    for first, second in steps(division, (0, plan((16, 16))))[:-1]:
        assert 14 <= len(first) <= 17
        assert 14 <= len(second) <= 18
    for least in (1, 4, 8):
        one_dear = CostDivision(np.array([100.0, *[1.0] * 15]), weights, min_local=least)
        assert sorted(map(len, one_dear.divide(range(16), (8, 8), plan((8, 8))).indices)) == [least, 16 - least]


def test_a_rank_without_a_share_gets_nothing_of_a_division():
    stream, history = PermutationStream(8, shuffle=True, seed=3), PlanHistory((PlanEntry(0, 0, plan((8, 0))),))
    division = CostDivision(COSTS[:8], SUM)
    first, second = (UnevenBatchSampler(stream, lambda: history, r, min_local=2, division=division) for r in (0, 1))
    assert sorted(next(iter(first))) == list(range(8))
    assert [len(batch) for batch in second] == [2]
