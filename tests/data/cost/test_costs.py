"""Lengths that are read without loading samples, and costs that a function gives."""

import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lightning_hetero.data.cost.costs import check_costs, computed_costs, known_lengths

TOKENS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
LENGTHS = [3.0, 1.0, 2.0, 4.0]


class Costly(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise RuntimeError("no sample may be loaded for its length")


class WithLengths(Costly):
    lengths = np.array([3, 1, 2, 4])


@pytest.mark.parametrize(
    "dataset",
    [
        datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": [0, 1, 0, 1]}),
        datasets.Dataset.from_dict({"text": list("abcd"), "length": [3, 1, 2, 4]}),
        datasets.Dataset.from_dict({"attention_mask": TOKENS}).with_format("torch"),
        datasets.Dataset.from_dict({"input_ids": TOKENS[::-1]}).select([3, 2, 1, 0]),
        [{"input_ids": tokens} for tokens in TOKENS],
        [{"num_tokens": len(tokens), "input_ids": [0]} for tokens in TOKENS],
        WithLengths(),
        Subset([{"input_ids": tokens} for tokens in [*TOKENS[::-1], [1] * 9]], [3, 2, 1, 0]),
        datasets.Dataset.from_dict({"length": list("abcd"), "input_ids": TOKENS}),
        datasets.Dataset.from_dict({"length": [3, None, 2, 4], "input_ids": TOKENS}),
        [{"attention_mask": 1, "labels": torch.zeros(len(tokens))} for tokens in TOKENS],
    ],
    ids=[
        *("input_ids", "length", "mask", "selected", "dicts", "num_tokens", "attribute", "subset"),
        *("text", "null", "tensors"),
    ],
)
def test_lengths_are_known(dataset):
    assert known_lengths(dataset).tolist() == LENGTHS


@pytest.mark.parametrize(
    "dataset",
    [
        Costly(),
        torch.utils.data.TensorDataset(torch.zeros(4, 2)),
        [torch.zeros(2)],
        datasets.Dataset.from_dict({"pixels": [[1.0]]}),
        [{"input": "text"}],
        [],
        datasets.Dataset.from_dict({"pixel_values": [[1.0]], "labels": [3]}),
        datasets.Dataset.from_dict({"input_ids": [[1], None]}),
        datasets.Dataset.from_dict({"input_ids": []}),
        [{"labels": torch.tensor(1)}, {"labels": torch.tensor(0)}],
        [{"input_ids": [1]}, {"labels": [1]}],
        [{"length": float("nan")}],
        type("Odd", (Costly,), {"lengths": [[1], [2, 3], [4], [5]]})(),
        type("Odd", (Costly,), {"lengths": property(lambda self: {"train": 3})})(),
        type("Odd", (Costly,), {"lengths": property(lambda self: 1 / 0)})(),
        type("Odd", (Costly,), {"lengths": np.array([1j, 2j, 3j, 4j])})(),
        type("Odd", (Costly,), {"lengths": list("abcd")})(),
        [{"labels": "cat"}, {"labels": "horse"}],
        [{"length": 10**400}],
    ],
    ids=[
        *("costly", "tensors", "list", "columns", "dicts", "empty"),
        *("labels", "nulls", "no rows", "scalars", "mixed", "nan", "ragged", "mapping"),
        *("raises", "complex", "words", "texts", "huge"),
    ],
)
def test_lengths_are_unknown_and_nothing_is_loaded(dataset):
    assert known_lengths(dataset) is None


def test_a_function_gets_the_sample_or_the_index():
    assert computed_costs(len, TOKENS, [0, 3]) == [3.0, 4.0]
    assert computed_costs(lambda index: index + 0.5, Costly(), [0, 3]) == [0.5, 3.5]
    assert computed_costs(lambda sample: len(sample), TOKENS, [1]) == [1.0]


def test_random_numbers_after_the_costs_are_those_without_them():
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def state(seed):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    state(7)
    expected = draws()
    state(7)
    computed_costs(lambda index: sum(draws()), None, range(3))
    assert draws() == expected


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_that_divide_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="for sample 1 .*above 0"):
        check_costs(np.array([1.0, bad]), 2, "cost_fn")
