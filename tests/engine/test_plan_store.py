"""Which plan a run begins or goes on with: the user's, a checkpoint's for these workers, or one of the policy's."""

from dataclasses import dataclass

import pytest

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.engine.plan_store import PlanStore

TWO, OTHERS = Workers(("a", "b"), (1.0, 1.0)), Workers(("a", "c"), (1.0, 1.0))
EARLIER, RUNNING, LATER = (
    PlanEntry(1, step, BatchPlan(10, sizes), reason)
    for step, sizes, reason in ((0, (6, 4), "earlier"), (4, (7, 3), "running"), (8, (8, 2), "later"))
)
STATIC = StaticPlanner()


@dataclass(frozen=True)
class Moves(StaticPlanner):
    """Says that it moves the total."""

    moves_total: bool = True


def begun(store, start, *, workers=TWO, total=10, planner=STATIC):
    store.begin(ControlPlane(0, 1), workers, HeteroConfig(), total, planner, start)
    return store


def saved(at=(1, 5), entries=(EARLIER, RUNNING, LATER)):
    """State of a run that stood here, in which three plans were agreed on."""
    store = PlanStore(False)
    for entry in entries:
        store.append(entry)
    return store.state_dict(TWO, at)


def resumed(start, state=None, **given):
    store = PlanStore(False)
    store.load_state_dict(state or saved())
    store.resume_at(*start)
    return begun(store, store.start_of(0), **given)


@pytest.mark.parametrize("start", [(1, 4), (1, 5), (1, 7)])
def test_a_run_goes_on_with_the_plan_of_the_checkpoint_from_its_very_step(start):
    store = resumed(start, saved(at=start))
    assert store.plan_at(start) is not None
    assert store.plan_at(start).local_batch_sizes == (7, 3)
    assert [entry.reason for entry in store.log] == ["running", "later"]
    assert store.plan_at((1, 8)).local_batch_sizes == (8, 2)


def test_a_plan_for_later_steps_is_not_of_a_run_that_goes_back():
    """Nor of one whose checkpoint does not say where it stood."""
    silent = {key: value for key, value in saved().items() if key != "at"}
    for store in (resumed((1, 4)), resumed((1, 5), silent)):
        assert [entry.reason for entry in store.log] == ["running"]
        assert store.plan_at((1, 9)).local_batch_sizes == (7, 3)


def test_other_workers_begin_anew_where_the_data_goes_on():
    store = resumed((1, 5), workers=OTHERS)
    assert store.plan_at((1, 4)).local_batch_sizes == (7, 3), "what ran says which samples were drawn"
    assert store.plan_at((1, 9)).local_batch_sizes == (5, 5)
    assert [(entry.epoch, entry.step) for entry in store.log] == [(1, 5)]


@pytest.mark.parametrize(("planner", "total"), [(StaticPlanner(), 20), (Moves(), 10)])
def test_a_total_is_that_of_the_loader_unless_the_policy_moves_it(planner, total):
    store = resumed((1, 5), saved(entries=(EARLIER, RUNNING)), total=20, planner=planner)
    assert store.plan_at((1, 5)).total_batch_size == total


def test_plans_of_a_checkpoint_count_once():
    store = resumed((1, 5), saved(entries=(EARLIER, RUNNING)))
    store.append(PlanEntry(1, 9, BatchPlan(10, (9, 1)), "newest"))
    begun(store, (2, 0))
    assert store.plan_at((2, 0)).local_batch_sizes == (9, 1)


def test_a_run_that_begins_anew_has_run_no_plan():
    store = resumed((1, 5))
    store.forget_running()
    assert (store.history, len(store.log)) == (None, 2)
    store.forget()
    assert (store.history, store.log) == (None, [])
    begun(store, (0, 0))
    assert [(entry.epoch, entry.step) for entry in store.log] == [(0, 0)]
    assert store.plan_at((0, 0)).local_batch_sizes == (5, 5)


def test_a_checkpoint_has_the_plans_from_its_epoch_on_and_where_it_stood():
    entries = (PlanEntry(0, 0, BatchPlan(10, (5, 5)), "first"), PlanEntry(0, 3, BatchPlan(10, (4, 6)), "second"))
    state = saved(at=(1, 5), entries=(*entries, RUNNING, LATER))
    assert state["at"] == [1, 5]
    assert state["workers"] == ["a", "b"]
    sizes = [tuple(entry["plan"]["local_batch_sizes"]) for entry in state["history"]["entries"]]
    assert sizes == [(4, 6), (7, 3), (8, 2)], "the one that the epoch began with, and those since"
