"""Weights of all ranks are compared on rank 0, and the first that differs is named once."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.comm.gradients.weight_check import WeightCheck, WeightSettings

STEP = (1, 7)


def checks(world_size=2, **settings):
    """One check for each rank."""
    ranks = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
    return [WeightCheck(control, WeightSettings(**settings)) for control in ranks]


def parameters(sizes=(3, 4), value=1.0):
    return {f"p{i}": nn.Parameter(torch.full((size,), value)) for i, size in enumerate(sizes)}


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_round_samples_other_parameters_the_same_on_all_ranks(count):
    """Parameters take turns, whatever number of them is sampled; places are drawn alike on all ranks."""
    weights = {f"p{i}": nn.Parameter(torch.full((5,), float(i))) for i in range(5)}
    first, second = checks(sampled=count)
    seen = []
    for _ in range(5):
        one, other = first.sample(weights), second.sample(weights)
        np.testing.assert_array_equal(one, other)
        seen += one.tolist()
    assert sorted(seen) == sorted([float(i) for i in range(5)] * count)


def test_places_without_a_weight_are_nan_and_say_nothing(caplog):
    first, second = checks(sampled=4)
    rows = [check.sample({"empty": nn.Parameter(torch.zeros(0)), **parameters((2,))}) for check in (first, second)]
    assert np.isnan(rows[0]).sum() == 3
    first.judge(np.array(rows), STEP)
    assert said(caplog) == []


@pytest.mark.parametrize(("off", "told"), [(0.0, False), (1.9e-3, False), (2.1e-3, True)])
def test_a_difference_counts_from_a_share_of_the_weights_size_on(off, told, caplog):
    """The limit is a thousandth of the weight itself and of the size of all sampled weights, 1 each here."""
    first, second = checks(sampled=2)
    rows = np.array([first.sample(parameters()), second.sample(parameters())])
    rows[1, 1] += off
    first.judge(rows, STEP)
    assert len(said(caplog)) == told
    if told:
        assert "behind batch 7 of epoch 1" in said(caplog)[0]
        assert "of p1 is 1 on rank 0 and 1.0021 on rank 1" in said(caplog)[0]


def test_halves_may_differ_by_some_roundings(caplog):
    """Eight roundings of bfloat16 are 6 %, of a size of 2."""
    weights = {"p": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    first, second = checks(sampled=1)
    rows = np.array([first.sample(weights), second.sample(weights)])
    rows[1] += 0.12
    first.judge(rows, STEP)
    assert said(caplog) == []
    rows[1] += 0.02
    first.judge(rows, STEP)
    assert len(said(caplog)) == 1


def test_only_rank_0_tells_and_once_a_training(caplog):
    first, second = checks(sampled=2)
    rows = np.array([first.sample(parameters()), second.sample(parameters())])
    rows[1] += 1.0
    second.judge(rows, STEP)
    assert said(caplog) == []
    for _ in range(2):
        first.judge(rows, STEP)
    assert len(said(caplog)) == 1
    first.begin()
    first.judge(rows, STEP)
    assert len(said(caplog)) == 2


def test_what_is_not_finite_on_a_rank_is_for_others_to_tell(caplog):
    first, second = checks(sampled=2)
    rows = np.array([first.sample(parameters()), second.sample(parameters())])
    rows[1, 0] = np.inf
    first.judge(rows, STEP)
    assert said(caplog) == []


@pytest.mark.parametrize("like", [torch.zeros(()), torch.zeros(2, 3).t(), torch.zeros(2, dtype=torch.complex64)])
def test_weights_of_any_layout_are_sampled(like):
    (check, _) = checks(sampled=1)
    weight = nn.Parameter(torch.full_like(like, 2.5))
    assert check.sample({"p": weight}).tolist() == [2.5]
