"""Residuals of an earlier run: nothing is lost or sent twice, whoever has them now."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_hetero.comm.compressors.residuals import ResidualPayout, left_alone, own_share, unsent

SINGLE = ((0,), (1,), (2,))
PAIRS = ((0, 1), (2, 3))


def topology_of(clusters, rank):
    """What a topology of these clusters says of itself."""
    leaders = [members[0] for members in clusters]
    return SimpleNamespace(clusters=clusters, size=len(clusters), is_leader=rank in leaders)


def ranks_of(seed, leaders, ranks):
    """States of ranks, of which the leaders have residuals of two parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "step": 7,
            "residuals": {name: torch.randn(5, generator=generator) for name in "ab"} if rank in leaders else {},
        }
        for rank in range(ranks)
    ]


def total(states):
    parts = [state["residuals"] for state in states]
    return {name: sum(part[name].double() for part in parts if name in part) for name in "ab"}


def test_no_state_is_no_share():
    assert own_share({}, topology_of(SINGLE, 0), 0) == {}


@pytest.mark.parametrize(("clusters", "named"), [(SINGLE, True), (SINGLE, False), (PAIRS, True)], ids=str)
def test_among_the_same_workers_each_has_its_own_back(clusters, named):
    """A state that names no clusters is one of single ranks."""
    leaders = [members[0] for members in clusters]
    ranks = ranks_of(0, leaders, sum(map(len, clusters)))
    state = {"ranks": ranks, **({"clusters": clusters} if named else {})}
    for rank, own in enumerate(ranks):
        assert own_share(state, topology_of(clusters, rank), rank) is own


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (SINGLE, ((0,), (1,))),
        (SINGLE, ((0,),)),
        (((0,), (1,)), SINGLE),
        (PAIRS, ((0,), (1,), (2,), (3,))),
        (((0,), (1,), (2,), (3,)), PAIRS),
        (PAIRS, ((0, 2), (1, 3))),
    ],
    ids=str,
)
def test_among_others_the_sum_is_the_same_and_shares_are_equal(before, now):
    """All that speak for somebody have a share; others of a cluster have none."""
    ranks = ranks_of(1, [members[0] for members in before], sum(map(len, before)))
    expected = total(ranks)
    shares = [
        own_share({"ranks": ranks, "clusters": before}, topology_of(now, rank), rank)
        for rank in range(sum(map(len, now)))
    ]
    holders = [share for share in shares if share["residuals"]]
    assert [bool(share["residuals"]) for share in shares] == [topology_of(now, r).is_leader for r in range(len(shares))]
    for name, value in total(shares).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert all(torch.equal(share["residuals"][name], holders[0]["residuals"][name]) for share in holders)
    assert all(share["step"] == 7 for share in shares)
    torch.testing.assert_close(total(ranks), expected, rtol=0, atol=0, msg="the state itself stays as it is")


def test_rank_0_says_that_they_were_split(caplog):
    caplog.set_level(logging.INFO, "lightning_hetero")
    for rank in (1, 0):
        assert not caplog.messages
        own_share({"ranks": ranks_of(0, range(3), 3)}, topology_of(((0,), (1,)), rank), rank)
    assert caplog.messages == ["residuals of 3 ranks were summed and split over 2"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_that_is_left_alone_speaks_for_all(ranks):
    (own,) = ranks_of(2, [0], 1)
    states = left_alone(own, SimpleNamespace(rank=0, world_size=ranks))
    assert len(states) == ranks
    assert states[0] is own
    assert all(state == {"step": 7, "residuals": {}} for state in states[1:])
    assert left_alone(own, SimpleNamespace(rank=1, world_size=3)) == []


def test_unsent_are_those_that_are_not_zero():
    here = torch.tensor([0.0, -1e-30])
    state = {"step": 7, "residuals": {"a": torch.zeros(2), "b": here}}
    assert unsent(state) == {"step": 7, "residuals": {"b": here}}
    assert unsent({"step": 7, "residuals": {"a": torch.zeros(2)}}) == {}
    assert unsent({"step": 7}) == {}


class Bucket:
    """Gradients of parameters, as DDP hands them to a hook."""

    def __init__(self, pairs):
        self.pairs = pairs

    def parameters(self):
        return [p for p, _ in self.pairs]

    def gradients(self):
        return [g for _, g in self.pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_over_ranks_gets_the_sum_of_residuals(dtype):
    """``mean_i (g_i + W r_i) = mean_i g_i + sum_i r_i``."""
    torch.manual_seed(0)
    ranks, weight = 3, nn.Parameter(torch.zeros(4, 5, dtype=dtype))
    gradients, residuals = torch.randn(ranks, 4, 5, dtype=dtype), torch.randn(ranks, 20)
    expected = gradients.mean(dim=0) + residuals.sum(dim=0).view(4, 5)
    for own, residual in zip(gradients, residuals, strict=True):
        payout = ResidualPayout({"w": residual}, {"w": weight}, ranks)
        assert payout(Bucket([(weight, own)])), "nothing is left"
    torch.testing.assert_close(gradients.mean(dim=0), expected.to(dtype))


def test_a_residual_is_in_the_order_of_memory():
    weight, gradient = nn.Parameter(torch.zeros(3, 2).t()), torch.arange(1.0, 7.0).view(3, 2).t()
    residual = torch.tensor([10.0, 20, 30, 40, 50, 60])
    ResidualPayout({"w": residual}, {"w": weight}, 1)(Bucket([(weight, gradient)]))
    assert gradient.t().reshape(-1).tolist() == [11, 22, 33, 44, 55, 66]


def test_each_residual_is_added_once_and_waits_for_a_gradient():
    a, b, stranger = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    payout = ResidualPayout({"a": torch.ones(2), "b": torch.ones(2)}, {"a": a, "b": b}, 2)
    used, unused, other = torch.tensor([0.0, 5.0]), torch.zeros(2), torch.tensor([3.0, 3.0])
    assert not payout(Bucket([(a, used), (b, unused), (stranger, other)]))
    assert (used.tolist(), unused.tolist(), other.tolist()) == ([2, 7], [0, 0], [3, 3])
    again = torch.tensor([1.0, 0.0])
    assert payout(Bucket([(a, used), (b, again)]))
    assert (used.tolist(), again.tolist()) == ([2, 7], [3, 2])


def test_of_a_module_and_its_state(caplog):
    caplog.set_level(logging.INFO, "lightning_hetero")
    module = nn.Linear(2, 1, bias=False)
    payout = ResidualPayout.of({"residuals": {"weight": torch.ones(2)}}, module, 4, scaled=False)
    gradient = torch.ones(1, 2)
    assert payout(Bucket([(module.weight, gradient)]))
    assert gradient.tolist() == [[5, 5]]
    assert [(r.levelno, "goes into the next one" in r.getMessage()) for r in caplog.records] == [(logging.INFO, True)]


def test_under_a_loss_scaler_they_wait(caplog):
    state = {"residuals": {"weight": torch.ones(2)}}
    assert ResidualPayout.of(state, nn.Linear(2, 1, bias=False), 4, scaled=True) is None
    assert "a loss scaler may skip the step" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
