"""Residuals go from one averager to the next, through checkpoints, and in the end into a dense sum."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.checkpoint import CompressionCheckpoint


class Averager:
    """Holds what it is given."""

    def __init__(self, kind="one", residual=0.0, blocks=None):
        self.kind, self.blocks = kind, blocks
        self.held, self.extra = {"w": torch.full((2,), residual)}, {"count": 1}

    def residuals(self):
        return self.held

    def load_residuals(self, residuals):
        self.held = residuals

    def extra_state(self):
        return self.extra

    def load_extra_state(self, state):
        self.extra = state


class Watch:
    """Estimates of the link."""

    def __init__(self, rate=None):
        self.rate = rate

    def state_dict(self):
        return {"rate": self.rate}

    def load_state_dict(self, state):
        self.rate = state["rate"]


class Optimizers:
    """Sparse steps with state of their own."""

    def __init__(self, waits=()):
        self.waits = list(waits)

    def state(self):
        return list(self.waits)

    def load_state(self, states):
        self.waits = list(states)


class Hook:
    """Adds residuals to a dense sum."""

    topology = None

    def __init__(self):
        self.payout = None

    def pay_out(self, payout):
        self.payout = payout


def checkpoint(rank=0, world_size=2, others=(), optimizers=None):
    control = SimpleNamespace(
        rank=rank,
        world_size=world_size,
        gather_objects_at_zero=lambda own: [] if rank else [own, *others],
    )
    return CompressionCheckpoint(control, Hook(), optimizers or Optimizers())


def saved(residuals, kind="one", waits=("kept",), rate=5.0):
    """State of as many ranks, each with this residual."""
    own = {"kind": kind, "extra": {"count": 7}, "waits": list(waits), "link": {"rate": rate}}
    ranks = [{**own, "residuals": {"w": torch.full((2,), value)}} for value in residuals]
    return {"ranks": ranks, "clusters": tuple((rank,) for rank in range(len(residuals)))}


def test_an_averager_that_goes_on_has_what_its_rank_had():
    """Residuals, optimizer's steps, the averager's own state, and what is known of the link."""
    one, averager, watch = checkpoint(rank=1), Averager(blocks="some"), Watch()
    one.load(saved([3.0, 4.0]))
    one.hand_over(averager, watch, before={})
    assert averager.held["w"].tolist() == [4.0, 4.0]
    assert averager.extra == {"count": 7}
    assert one.optimizers.waits == ["kept"]
    assert watch.rate == 5.0


def test_another_kind_takes_residuals_and_nothing_of_the_others_own():
    one, averager, watch = checkpoint(), Averager("other", blocks="some"), Watch(rate=1.0)
    one.load(saved([3.0, 4.0]))
    one.hand_over(averager, watch, before={})
    assert averager.held["w"].tolist() == [3.0, 3.0]
    assert (averager.extra, watch.rate) == ({"count": 1}, 1.0)


def test_a_checkpoint_goes_before_the_forerunner_and_counts_once():
    one, first, second = checkpoint(), Averager(), Averager()
    before = one.of_rank(Averager(residual=9.0), Watch())
    one.load(saved([3.0, 4.0]))
    one.hand_over(first, Watch(), before)
    one.hand_over(second, Watch(), before)
    assert first.held["w"].tolist() == [3.0, 3.0]
    assert second.held["w"].tolist() == [9.0, 9.0]
    third = Averager(residual=1.0)
    one.hand_over(third, Watch(), before={})
    assert third.held["w"].tolist() == [1.0, 1.0], "there is nothing to go on with"


def test_the_state_of_all_ranks_goes_through_rank_0():
    other = {"kind": "one", "residuals": {"w": torch.ones(2)}}
    first, second = checkpoint(0, others=[other]), checkpoint(1)
    own = first.of_rank(Averager(residual=2.0), Watch())
    state = first.of_all(own, alone=False)
    assert [rank["residuals"]["w"].tolist() for rank in state["ranks"]] == [[2.0, 2.0], [1.0, 1.0]]
    assert state["clusters"] == Topology.flat_over(0, 2).clusters
    assert second.of_all(own, alone=False) == {}


def test_a_rank_that_is_alone_saves_its_own_and_none_for_the_others():
    one = checkpoint()
    state = one.of_all(one.of_rank(Averager(residual=2.0), Watch()), alone=True)
    assert [list(rank["residuals"]) for rank in state["ranks"]] == [["w"], []]


def test_what_was_loaded_and_nobody_took_is_saved_again():
    one = checkpoint(others=[{}])
    one.load(saved([3.0, 4.0]))
    state = one.of_all(one.of_rank(None, Watch()), alone=False)
    assert state["ranks"][0]["residuals"]["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_dense_sum_gets_what_was_not_sent(scaled):
    """That of the averager that ends, or of a checkpoint, which goes before it; zeros are nothing to add."""
    one, module = checkpoint(), nn.Module()
    module.w = nn.Parameter(torch.zeros(2))
    one.pay_out(module, one.of_rank(Averager(residual=0.0), Watch()), scaled=scaled)
    assert one.hook.payout is None
    one.pay_out(None, one.of_rank(Averager(residual=2.0), Watch()), scaled=scaled)
    assert one.hook.payout is None, "the module is not known yet"
    one.pay_out(module, one.of_rank(Averager(residual=2.0), Watch()), scaled=scaled)
    assert (one.hook.payout is None) == scaled, "a loss scaler may skip that step, so that they wait"
    assert one.of_rank(None, Watch())["residuals"]["w"].tolist() == [2.0, 2.0], "until it is added, it is saved"
    one.drop_payout()
    assert one.hook.payout is None
    assert one.of_rank(None, Watch()) == {}
    one.load(saved([3.0, 4.0]))
    one.pay_out(module, one.of_rank(Averager(residual=2.0), Watch()), scaled=scaled)
    assert one.of_rank(None, Watch())["residuals"]["w"].tolist() == [3.0, 3.0]
    one.clear()
    assert one.hook.payout is None


def test_what_was_paid_out_is_neither_saved_nor_paid_again():
    """A checkpoint's residuals go into one dense sum; a later checkpoint and a second training have none of them."""
    one, module = checkpoint(others=[{}]), nn.Module()
    module.w = nn.Parameter(torch.zeros(2))
    one.load(saved([3.0, 4.0]))
    one.pay_out(module, {}, scaled=False)
    one.hook.payout.residuals.clear()  # they were added to a bucket
    assert one.of_all(one.of_rank(None, Watch()), alone=False) == {}
    one.drop_payout()
    one.pay_out(module, one.of_rank(None, Watch()), scaled=False)
    assert one.hook.payout is None
