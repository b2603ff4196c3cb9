"""Outcome of a sync round: what an engine gives for one that adopts a plan and for one that keeps it."""

import torch

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core import BatchPlan
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine


def test_a_round_says_what_it_adopted_and_what_it_kept():
    engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
    engine.shard(PermutationStream(40, shuffle=False, seed=0), batch_size=4)
    kept = engine.exchange(StaticPlanner())
    assert isinstance(kept, RoundResult)
    assert (kept.entry, kept.predicted, kept.density, kept.observations.num_steps) == (None, None, False, 0)
    entry = engine.adopt(BatchPlan(2, (2,)), "by hand", not_before=(0, 3))
    assert (entry.epoch, entry.step, entry.reason) == (0, 3, "by hand")
    assert engine.history.last == entry
