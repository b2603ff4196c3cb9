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


def values(sampled):
    """The weights among what is sampled; digests and kinds of devices follow."""
    return sampled[: len(sampled) // 3]


def rows(first, second, weights, other=None, kinds=()):
    """What two ranks send, on devices of these kinds."""
    sent = np.array([first.sample(weights), second.sample(other or weights)])
    for row, kind in zip(sent, kinds, strict=False):
        row[2 * len(row) // 3 :] = kind
    return sent


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
        seen += values(one).tolist()
    assert sorted(seen) == sorted([float(i) for i in range(5)] * count)


def test_places_without_a_weight_are_nan_and_say_nothing(caplog):
    first, second = checks(sampled=4)
    sent = rows(first, second, {"empty": nn.Parameter(torch.zeros(0)), **parameters((2,))})
    assert np.isnan(sent[0].reshape(3, -1)).sum(axis=1).tolist() == [3, 3, 3]
    first.judge(sent, STEP)
    assert said(caplog) == []


@pytest.mark.parametrize(("off", "told"), [(0.0, False), (1.9e-3, False), (2.1e-3, True)])
def test_a_difference_counts_from_a_share_of_the_weights_size_on(off, told, caplog):
    """The limit is a thousandth of the weight itself and of the size of all sampled weights, 1 each here."""
    first, second = checks(sampled=2)
    sent = rows(first, second, parameters())
    sent[1, 1] += off
    first.judge(sent, STEP)
    assert len(said(caplog)) == told
    if told:
        assert "behind batch 7 of epoch 1" in said(caplog)[0]
        assert "of p1 is 1 on rank 0 and 1.0021 on rank 1" in said(caplog)[0]


def test_halves_may_differ_by_some_roundings(caplog):
    """Eight roundings of bfloat16 are 6 %, of a size of 2."""
    weights = {"p": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    first, second = checks(sampled=1)
    sent = rows(first, second, weights)
    sent[1, 0] += 0.12
    first.judge(sent, STEP)
    assert said(caplog) == []
    sent[1, 0] += 0.02
    first.judge(sent, STEP)
    assert len(said(caplog)) == 1


def test_only_rank_0_tells_and_once_a_training(caplog):
    first, second = checks(sampled=2)
    sent = rows(first, second, parameters())
    sent[1] += 1.0
    second.judge(sent, STEP)
    assert said(caplog) == []
    for _ in range(2):
        first.judge(sent, STEP)
    assert len(said(caplog)) == 1
    first.begin()
    first.judge(sent, STEP)
    assert len(said(caplog)) == 2


def test_what_is_not_finite_on_a_rank_is_for_others_to_tell(caplog):
    first, second = checks(sampled=2)
    sent = rows(first, second, parameters())
    sent[1, [0, 2]] = np.inf  # a weight, and the digest around it
    first.judge(sent, STEP)
    assert said(caplog) == []


@pytest.mark.parametrize("like", [torch.zeros(()), torch.zeros(2, 3).t(), torch.zeros(2, dtype=torch.complex64)])
def test_weights_of_any_layout_are_sampled(like):
    (check, _) = checks(sampled=1)
    weight = nn.Parameter(torch.full_like(like, 2.5))
    assert values(check.sample({"p": weight})).tolist() == [2.5]


# bits


ODD = [
    torch.ones(()),
    torch.ones(3, 4).t(),
    torch.ones(3, 4)[:, ::2],
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    *[torch.ones(5, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)],
]


def smallest_change(tensor, place):
    """The same tensor with one bit of one element changed."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.clone().reshape(-1)
    flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])[place] ^= 1
    changed = flat.reshape(real.shape)
    return torch.view_as_complex(changed) if tensor.is_complex() else changed


@pytest.mark.parametrize("like", ODD, ids=lambda one: f"{tuple(one.shape)} {one.dtype}")
@pytest.mark.parametrize("kinds", [(1.0, 1.0), (1.0, 2.0)], ids=["one kind", "two kinds"])
def test_one_bit_of_one_weight_is_found_on_devices_of_one_kind(like, kinds, caplog):
    first, second = checks(sampled=2)
    fine = {"a": nn.Parameter(torch.ones(2)), "p": nn.Parameter(like)}
    first.judge(rows(first, second, fine, {**fine, "p": nn.Parameter(like.clone())}, kinds), STEP)
    assert said(caplog) == []
    first.judge(rows(first, second, fine, {**fine, "p": nn.Parameter(smallest_change(like, -1))}, kinds), STEP)
    assert len(said(caplog)) == (kinds[0] == kinds[1])
    if said(caplog):
        assert "behind batch 7 of epoch 1: bits of p are not the same on rank 0 and rank 1" in said(caplog)[0]


def test_the_first_parameter_that_differs_is_told(caplog):
    first, second = checks(sampled=3)
    weights = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    other = {**weights, **{name: nn.Parameter(smallest_change(torch.ones(2), 0)) for name in "bc"}}
    for _ in range(2):
        first.judge(rows(first, second, weights, other), STEP)
    assert len(said(caplog)) == 1
    assert "bits of b are" in said(caplog)[0]


def test_bits_are_compared_within_each_kind(caplog):
    three = checks(world_size=3, sampled=1)
    weight = torch.ones(4)
    sent = np.array([check.sample({"p": nn.Parameter(weight)}) for check in three[:2]])
    other = three[2].sample({"p": nn.Parameter(smallest_change(weight, 1))})
    for kinds, told in [((1.0, 1.0, 2.0), None), ((1.0, 2.0, 2.0), (1, 2)), ((2.0, 1.0, 2.0), (0, 2))]:
        everyone = np.array([*sent, other])
        everyone[:, 2] = kinds
        caplog.clear()
        three[0].begin()
        three[0].judge(everyone, STEP)
        assert bool(said(caplog)) == (told is not None)
        assert told is None or f"not the same on rank {told[0]} and rank {told[1]}," in said(caplog)[0]


def test_a_large_parameter_is_digested_part_by_part(caplog):
    """Each time the part with the weight that is sampled; sooner or later it is the one that differs."""
    first, second = checks(sampled=1, digested=10)
    weight = torch.ones(95)
    fine, off = ({"p": nn.Parameter(one)} for one in (weight, smallest_change(weight, 94)))
    rounds = 0
    while not said(caplog) and rounds < 200:
        rounds += 1
        first.judge(rows(first, second, fine, off), STEP)
    assert 1 < rounds < 200
    assert float(first.sample(fine)[0]) == 1.0


def test_another_device_number_of_threads_or_version_is_another_kind(monkeypatch):
    kinds = []
    for name, threads, version in (("a", 1, "2"), ("a", 1, "2"), ("b", 1, "2"), ("a", 2, "2"), ("a", 1, "3")):
        monkeypatch.setattr("lightning_hetero.comm.gradients.weight_check.device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(torch, "__version__", version)
        (check, _) = checks(sampled=1)
        kinds.append(float(check.sample(parameters((1,)))[2]))
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 4
