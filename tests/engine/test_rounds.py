"""What a sync round decides holds from the same step on for all ranks: behind what any of them has drawn."""

import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.session import HeteroSession
from tests.decisions.told import told_time
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def session_of(rank=0, ranks=1, planner=None, samples=800, batch_size=4, slot=None, seed=0, **config):
    """A session of one rank with its batches; ``slot`` is another worker's."""
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    slot = rank if slot is None else slot
    engine = HeteroEngine(HeteroConfig(**config), rank=rank, world_size=ranks, device=CPU, local_rank=slot)
    session = HeteroSession(engine, planner)
    return session, session.shard(PermutationStream(samples, shuffle=True, seed=seed), batch_size)


def steps(session, batches, ahead=0, window=1):
    """Trains on each batch of a pass, after it is yielded; a loader has drawn so many more batches before."""
    weight = torch.zeros(1, requires_grad=True)

    def loader():
        drawn, iterator = deque(), iter(batches)
        for _ in range(ahead):
            with suppress(StopIteration):
                drawn.append(next(iterator))
        for batch in iterator:
            drawn.append(batch)
            yield drawn.popleft()
        yield from drawn

    for number, batch in enumerate(session.steps(loader)):
        yield number, len(batch)
        with session.engine.backward():
            if (number + 1) % window == 0:
                session.engine.observer.bucket_done(session.engine.observer.bucket_ready())  # as DDP's hook does
            weight.sum().backward()


@pytest.mark.parametrize(("window", "ahead", "begins"), [(1, 0, 13), (1, 4, 17), (3, 0, 15), (3, 3, 18), (2, 3, 16)])
def test_a_plan_begins_with_the_first_window_that_nobody_has_drawn(window, ahead, begins):
    session, batches = session_of()
    for number, _ in steps(session, batches, ahead, window):
        if number == 12:
            entry = session.engine.adopt(BatchPlan(3, (3,)))
            break
    assert (entry.epoch, entry.step) == (0, begins)


@pytest.mark.parametrize(("not_before", "begins"), [((0, 2), (0, 5)), ((0, 9), (0, 9)), ((1, 0), (1, 0))])
def test_a_plan_begins_no_earlier_than_asked_for_and_changes_no_batch_before(not_before, begins):
    session, batches = session_of(samples=80)
    sizes = []
    for number, size in steps(session, batches):
        sizes.append(size)
        if number == 4:
            entry = session.engine.adopt(BatchPlan(2, (2,)), not_before=not_before)
    assert (entry.epoch, entry.step) == begins
    changed = begins[1] if begins[0] == 0 else len(sizes)
    assert sizes == [4] * changed + [2] * ((80 - 4 * changed) // 2)
    assert next(size for _, size in steps(session, batches)) == 2


def _one_is_ahead(rank, ahead):
    session, batches = session_of(rank, 2)
    for number, _ in steps(session, batches, 5 if rank == ahead else 0):
        if number == 1:
            step = session.adopt(BatchPlan(8, (5, 3))).step
            break
    session.close()
    return step


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_plan_begins_behind_the_rank_that_has_drawn_most(ahead):
    assert run_ranks(_one_is_ahead, 2, ahead) == [7, 7]


@pytest.mark.parametrize(("name", "size"), [("min_local_batch_size", 1), ("local_batch_multiple", 3)])
def test_a_plan_that_a_rank_cannot_run_is_refused(name, size):
    session, _ = session_of(**{name: 2})
    with pytest.raises(ValueError, match=f"{name}=2"):
        session.adopt(BatchPlan(size, (size,)))
    assert [entry.plan.local_batch_sizes for entry in session.engine.plan_history] == [(4,)]


# what planners are told


def test_a_backward_pass_is_needed_again_for_the_batch_after_an_optimizer_step():
    session, batches = session_of()
    for number, _ in steps(session, batches):
        if number:
            session.engine.check_backward()
            break
    run = session.steps(lambda: iter(batches))
    next(run)
    with pytest.raises(RuntimeError, match="called directly"):
        session.engine.check_backward()


# what is measured


def test_neither_a_round_nor_writing_a_checkpoint_is_part_of_a_step():
    """Steps take a second; a checkpoint behind the sixth takes a hundred."""
    with told_time() as clock:
        session, batches = session_of(replan=10)
        engine, found = session.engine, []
        session.on_metrics = lambda metrics: (found.append(engine.observations()), clock.spend(50.0))
        for number, _ in steps(session, batches):
            clock.spend(1.0)
            if number == 5:
                session.state_dict()
                clock.spend(100.0)
            if number == 30:
                break
    times = np.concatenate([one.step_time[:, 0] for one in found])
    assert len(found) == 3
    assert np.nanmax(times) == np.nanmin(times) == 1.0
    assert 0 < np.isnan(times).sum() <= 4


def _without_samples(rank):
    """Rank 1 has no samples, and runs one of rank 0's with weight 0."""
    session, batches = session_of(rank, 2, local_batch_sizes=(8, 0))
    for number, _ in steps(session, batches):
        if number == 8:
            break
    session.engine.exchange(None)
    seen = np.unique(session.engine.observations().local_batch_sizes, axis=0).tolist()
    session.engine.exchange(None)
    assert session.engine.observations().num_steps > 0, "observations stay until there are newer ones"
    session.close()
    return seen, session.engine.own_size


def test_what_is_timed_is_the_batch_that_was_run():
    assert run_ranks(_without_samples, 2) == [([[8.0, 1.0]], 8), ([[8.0, 1.0]], 0)]


def _another_order(rank):
    session_of(rank, 2, seed=rank)


def test_ranks_that_draw_another_order_are_told():
    errors = run_ranks(_another_order, 2, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "PlanMismatchError"), (1, "PlanMismatchError")]
    assert all("training data" in message for *_, message in errors)


# plans of a checkpoint


def _goes_on(rank, slots, later, planner, batch_size):
    """Two plans, one of which is yet to come; then another session goes on from the state of a step."""
    first, batches = session_of(rank, 2, batch_size=5, samples=120)
    first.adopt(BatchPlan(10, (7, 3)), "running")
    for number, _ in steps(first, batches):
        if number == 3 and later:
            first.engine.adopt(BatchPlan(10, (8, 2)), "later", not_before=(0, 8))
        if number == 5:
            state = first.state_dict()
            break
    again, _ = session_of(rank, 2, batch_size=batch_size, samples=120, slot=slots[rank], planner=planner, policy=None)
    again.load_state_dict(state)
    batches = again.shard(PermutationStream(120, shuffle=True, seed=0), batch_size)
    again.skip()
    sizes = [size for _, size in steps(again, batches)]
    first.close(), again.close()
    return sizes[:2], sizes[-2], [(entry.step, entry.reason) for entry in again.engine.plan_history]


@dataclass(frozen=True)
class MovesTotal(StaticPlanner):
    moves_total: bool = True


@pytest.mark.parametrize(
    ("slots", "planner", "batch_size", "first", "last"),
    [
        ((0, 1), StaticPlanner(), 5, (7, 3), (8, 2)),
        ((0, 5), StaticPlanner(), 5, (5, 5), (5, 5)),  # other workers begin anew
        ((0, 1), StaticPlanner(), 10, 20, 20),  # a total is that of the loader
        ((0, 1), MovesTotal(), 10, (7, 3), (8, 2)),  # unless the policy moves it
    ],
)
def test_a_run_goes_on_with_the_plans_of_its_checkpoint(slots, planner, batch_size, first, last):
    found = run_ranks(_goes_on, 2, slots, first != 20, planner, batch_size)
    for ran, expected in (
        (tuple(begins[-1] for begins, *_ in found), first),
        (tuple(end for _, end, _ in found), last),
    ):
        assert ran == expected or sum(ran) == expected
    assert found[0][2] == found[1][2]


# what costs of samples teach


@pytest.mark.parametrize("row", [2, 4, 6], ids=["padded", "packed", "fixed"])
def test_the_learned_split_by_cost_is_near_the_optimum(row, monkeypatch):
    """The closed loop with the default planner, on a seed that the benchmark does not have."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = import_module("lengths")
    monkeypatch.delitem(sys.modules, "lengths")
    found = benchmark.measure(*benchmark.ROWS[row][2:], seed=11)
    assert found["cost"] > 0.95
    assert found["cost"] == max(found.values())
