"""What a sync round decides holds from the same step on for all ranks: behind what any of them has drawn."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.timing.settings import TimingSettings
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from tests.helpers import run_ranks

SMALLER = BatchPlan(3, (3,))


def alone(**config):
    engine = HeteroEngine(HeteroConfig(**config), rank=0, world_size=1, device=torch.device("cpu"))
    engine.shard(PermutationStream(800, shuffle=False, seed=0), batch_size=4)
    return engine


def train(engine, *steps, epoch=0):
    for step in steps:
        engine.begin_step(epoch, step)
        with engine.backward():
            engine.observer.bucket_done(engine.observer.bucket_ready())
        engine.end_step()


@pytest.mark.parametrize(("window", "drawn", "begins"), [(1, 4, 4), (3, 4, 6), (3, 6, 6), (2, 7, 8)])
def test_a_window_has_one_plan(window, drawn, begins):
    """A plan begins with the first window of which no micro-batch was drawn."""
    engine = alone()
    engine.rounds.accumulate(window)
    engine.sampler.drawn = (0, drawn)
    entry = engine.adopt(SMALLER)
    assert (entry.epoch, entry.step) == (0, begins)


@pytest.mark.parametrize(("not_before", "begins"), [((0, 2), (0, 4)), ((0, 9), (0, 9)), ((1, 0), (1, 0))])
def test_a_plan_begins_no_earlier_than_asked_for(not_before, begins):
    engine = alone()
    engine.sampler.drawn = (0, 4)
    entry = engine.adopt(SMALLER, not_before=not_before)
    assert (entry.epoch, entry.step) == begins


def _one_is_ahead(rank, ahead):
    dist.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(), rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank)
    engine.shard(PermutationStream(800, shuffle=False, seed=0), batch_size=4)
    engine.sampler.drawn = (0, 7 if rank == ahead else 4)
    return engine.adopt(BatchPlan(8, (5, 3))).step


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_plan_begins_behind_the_rank_that_has_drawn_most(ahead):
    assert run_ranks(_one_is_ahead, 2, ahead) == [7, 7]


@pytest.mark.parametrize(("name", "size"), [("min_local_batch_size", 1), ("local_batch_multiple", 3)])
def test_a_plan_that_a_rank_cannot_run_is_refused(name, size):
    engine = alone(**{name: 2})
    with pytest.raises(ValueError, match=f"{name}=2"):
        engine.adopt(BatchPlan(size, (size,)))
    assert engine.history.last.plan.local_batch_sizes == (4,)


def test_observations_stay_until_there_are_newer_ones():
    engine = alone()
    train(engine, *range(8))
    engine.exchange(StaticPlanner(), not_before=(0, 8))
    steps = engine.observations().num_steps
    assert steps > 0
    engine.exchange(StaticPlanner(), not_before=(0, 8))
    assert engine.observations().num_steps == steps


def test_a_large_cluster_sends_its_newest_steps_only(monkeypatch):
    monkeypatch.setattr("lightning_hetero.engine.parts.SETTINGS", TimingSettings(min_steps=3, all_rows=5))
    engine = alone()
    train(engine, *range(20))
    engine.exchange(StaticPlanner(), not_before=(0, 20))
    assert engine.observations().num_steps == 5
    assert len(engine.observer.take()) == 5


def test_plans_of_the_running_epoch_are_kept():
    engine = alone()
    train(engine, 0, 1)
    engine.adopt(SMALLER, not_before=(0, 5))
    train(engine, 2, 3, 4)
    engine.adopt(BatchPlan(2, (2,)), not_before=(1, 0))
    train(engine, 5)
    assert engine.plan == SMALLER
    train(engine, 0, epoch=1)
    assert engine.plan.local_batch_sizes == (2,)


class Looks(StaticPlanner):
    """Notes where it was asked."""

    def __init__(self, engine):
        self.engine, self.at = engine, []

    moves_total = True

    def decide(self, observations, current, context):
        self.at.append(self.engine.observer.synced_steps)
        return Decision(self)


@pytest.mark.parametrize(("own", "looks"), [(False, [8, 16, 20, 28]), (True, [8, 16, 24])])
def test_only_where_the_number_of_micro_batches_may_move_is_there_a_look_between_epochs(own, looks):
    """After 20 steps the last look that may move it was at the start, after 24 it was four steps before."""
    engine = alone(replan=8)
    engine.rounds.keep_window(own)
    planner = Looks(engine)
    for epoch, steps in ((0, range(20)), (1, range(4)), (2, range(7))):
        if epoch and engine.sync_due_at_epoch(planner):
            engine.exchange(planner, not_before=(epoch, 0))
        for step in steps:
            train(engine, step, epoch=epoch)
            if engine.sync_due:
                engine.exchange(planner, not_before=(epoch, step + 1))
    assert planner.at == looks


class Shrinks(StaticPlanner):
    """Proposes another plan, and looks again as soon as it was measured."""

    moves_total = True

    def decide(self, observations, current, context):
        return Decision(self, Proposal(SMALLER, "given"), soon=True)


def test_steps_under_the_old_plan_are_counted_from_the_start_of_the_next_epoch():
    """A plan that begins with it has no step before it, whatever the step of the running epoch."""
    engine = alone()
    train(engine, *range(16))
    engine.exchange(Shrinks(), not_before=(1, 0))
    assert engine.rounds.schedule.next == 16 + 8 + 1


# a memory bound that falls in the run


def _one_has_run_out(rank, config, planner):
    dist.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(**config), rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank)
    engine.shard(PermutationStream(800, shuffle=False, seed=0), batch_size=4)
    if rank == 1:
        engine.data.lower_memory_bound(2)
        engine.data.lower_memory_bound(3)
    kept = engine.exchange(planner, last=True).entry
    entry = engine.exchange(planner).entry
    return kept, None if entry is None else entry.plan.local_batch_sizes, engine.workers.max_local


@pytest.mark.parametrize("planner", [None, StaticPlanner()])
def test_all_ranks_take_a_plan_within_the_bound_of_one(planner):
    """At the next round, whether the planner has observed anything by then or not; not when training ends."""
    for kept, sizes, bounds in run_ranks(_one_has_run_out, 2, {"policy": "even"}, planner):
        assert kept is None
        assert sizes == (6, 2)
        assert bounds[1] == 2


def _none_has_room(rank):
    dist.init_process_group("gloo")
    engine = HeteroEngine(HeteroConfig(), rank=rank, world_size=2, device=torch.device("cpu"), local_rank=rank)
    engine.shard(PermutationStream(800, shuffle=False, seed=0), batch_size=4)
    engine.data.lower_memory_bound(3)
    engine.exchange(None, last=True)
    with pytest.raises(ValueError, match=r"a total batch of 8 samples does not fit.*\[3, 3\], together 6"):
        engine.exchange(None)
    return True


def test_a_total_that_no_longer_fits_is_an_error_on_all_ranks_unless_training_ends():
    assert run_ranks(_none_has_room, 2) == [True, True]


def test_a_split_that_the_user_has_fixed_keeps_its_sizes():
    for _, sizes, bounds in run_ranks(_one_has_run_out, 2, {"local_batch_sizes": (4, 4)}, None):
        assert (sizes, bounds) == (None, None)


def test_a_hastened_round_follows_the_next_step():
    engine = alone(replan="epoch")
    engine.rounds.hasten()
    train(engine, 0)
    assert engine.sync_due
