"""A step and a sync round of an engine: what each of its parts is told of them."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.gradients.loss_weighting import LossWeighting
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from tests.engine.test_sync_rounds import alone, train
from tests.helpers import run_ranks


def test_the_batch_is_known_by_the_samples_of_all_ranks():
    engine = alone()
    engine.weighting.hold_several()
    engine.begin_step(0, 0, torch.zeros(4, 2))
    assert engine.weighting.trace.open[-1].rows == (4,)


def _without_samples(rank):
    """Rank 1 has no samples, and runs one of rank 0's with weight 0."""
    dist.init_process_group("gloo")
    config = HeteroConfig(local_batch_sizes=(8, 0))
    engine = HeteroEngine(config, rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank)
    engine.shard(PermutationStream(400, shuffle=False, seed=0), batch_size=4)
    train(engine, *range(8))
    engine.exchange(None)
    return np.unique(engine.observations().local_batch_sizes, axis=0).tolist(), engine.own_size


def test_what_is_timed_is_the_batch_that_was_run():
    assert run_ranks(_without_samples, 2) == [([[8.0, 1.0]], 8), ([[8.0, 1.0]], 0)]


def test_a_sync_round_is_no_part_of_the_step_behind_it():
    engine = alone()
    train(engine, *range(8))
    engine.exchange(None)
    train(engine, *range(8, 16))
    engine.exchange(None)
    first, *others = engine.observations().step_time[:, 0]
    assert np.isnan(first)
    assert np.isfinite(others).all()


@dataclass(frozen=True)
class Counts(StaticPlanner):
    """Knows more after each decision, and decides on the density."""

    seen: int = 0
    density: DensityChoice | None = None

    def predict(self, plan, context):
        return float(self.seen)

    def decide(self, observations, current, context):
        return Decision(Counts(self.seen + 1), density=self.density)


def test_a_prediction_is_that_of_the_planner_that_has_seen_the_steps():
    engine = alone()
    train(engine, *range(8))
    assert engine.exchange(Counts()).predicted == 1.0


@dataclass(frozen=True)
class Moves(Counts):
    """Proposes another plan each time."""

    def decide(self, observations, current, context):
        plan = BatchPlan(current.total_batch_size, current.local_batch_sizes, step_time=1.0 + self.seen)
        return Decision(Moves(self.seen + 1), Proposal(plan, "why not"))


@pytest.mark.parametrize("last", [True, False])
def test_in_the_last_round_the_planner_learns_and_nothing_changes(monkeypatch, last):
    engine, warned = alone(), []
    monkeypatch.setattr(engine.rounds.diagnosis, "observe", lambda seen, **known: warned.append(1))
    train(engine, *range(8))
    before = len(engine.plan_history)
    done = engine.exchange(Moves(), not_before=(0, 9), last=last)
    assert (done.planner.seen, done.observations.num_steps > 0) == (1, True)
    assert (done.entry is None, len(engine.plan_history) - before, warned) == (
        (True, 0, []) if last else (False, 1, [1])
    )


def test_a_run_of_one_worker_has_no_last_round():
    engine = alone()
    train(engine, *range(8))
    assert not engine.steps_to_conclude


@pytest.mark.parametrize("choice", [None, DensityChoice(0.1, 4, 1.0, 1.0, 0.1, 0.1)])
def test_the_diagnosis_of_the_link_is_told_of_a_controller(monkeypatch, choice):
    engine, told = alone(), []
    monkeypatch.setattr(engine.rounds.diagnosis, "observe", lambda seen, **known: told.append(known["controlled"]))
    train(engine, *range(8))
    engine.exchange(Counts(density=choice))
    assert told == [choice is not None]


def test_metrics_are_of_all_that_sends():
    engine = alone()
    train(engine, *range(8))
    done = engine.exchange(None)
    engine.hook_state.set_staleness(SimpleNamespace(metrics=lambda: {"hetero/delayed_share": 0.5}))
    assert engine.metrics(done, engine.plan)["hetero/delayed_share"] == 0.5


def test_a_backward_pass_is_needed_again_for_the_batch_after_an_optimizer_step():
    engine = alone()
    train(engine, 0)
    engine.check_backward()
    engine.begin_step(0, 1)
    with pytest.raises(RuntimeError, match="called directly"):
        engine.check_backward()


@pytest.mark.parametrize("waits", [False, True])
def test_waiting_for_the_counts_of_other_ranks_is_no_computing(monkeypatch, waits):
    engine, entered = alone(), []
    monkeypatch.setattr(LossWeighting, "waits", waits)
    monkeypatch.setattr(engine.observer, "excluded", lambda: nullcontext(entered.append(1)))
    engine.begin_step(0, 0)
    engine.scale_loss(torch.tensor(1.0))
    assert entered == [1] * waits


@dataclass(frozen=True)
class Enlarges(StaticPlanner):
    """Proposes a larger total without saying that it changes it."""

    def initial(self, context):
        return None

    def decide(self, observations, current, context):
        total = current.total_batch_size + 1
        return self, Proposal(BatchPlan(total, (total,)), "more")


def test_what_a_planner_decides_is_checked_where_it_is_carried_out():
    engine = alone()
    train(engine, *range(8))
    with pytest.raises(ValueError, match=r"decide\(\) of Enlarges changes the total batch"):
        engine.exchange(Enlarges())
