"""What ranks agree on, and how: one message per round, one decision for all, what a run begins with, when it looks."""

import logging
import pickle
from datetime import timedelta
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader

import lightning_hetero
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.comm.agreement.control_plane import ControlPlane, before_another
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.agreement.shared_counter import SharedCounter
from lightning_hetero.comm.agreement.sync_round import Padding, gather_payloads
from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.comm.collectives.async_ops import SharedNotes
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.membership.roster import MembersStore
from lightning_hetero.comm.membership.slots import GENERATION
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan
from lightning_hetero.core.no_effect import NoEffect
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import run_ranks

WITHIN = timedelta(seconds=30)

# the control plane


class TwoPartsError(Exception):
    """Can be sent and not be received: what is called anew is given its one text."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


def raises(error):
    raise error


DECISIONS = {
    "an error": lambda: raises(KeyError("no split")),
    "one that cannot be received": lambda: raises(TwoPartsError("the policy", "no split")),
    "the end of a loop": lambda: next(iter(())),
    "the end of the process": lambda: raises(SystemExit(3)),
    "what cannot be sent": lambda: lambda: 1,
}


class Payload:
    """Sends given numbers and keeps what it is given."""

    def __init__(self, *numbers):
        self.numbers, self.taken = np.array(numbers, dtype=float), None

    def pack(self):
        return self.numbers

    def unpack(self, everyone, control):
        self.taken = everyone.tolist()


def error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)


def _agrees(rank, world_size):
    """All that a control plane does, on one rank."""
    dist.init_process_group("gloo")
    called, before = [], len(dist.distributed_c10d._world.pg_map)
    for name in ("first", "second"):
        before_another(lambda name=name: called.append((name, len(dist.distributed_c10d._world.pg_map) - before)))
    plane = ControlPlane(rank, world_size, timeout=WITHIN)
    found = {"called": called, "not contiguous": plane.gather(np.arange(6.0).reshape(2, 3).T + rank).tolist()}
    values = np.array([rank, rank], dtype=float)
    wait = plane.gather_later(values)
    values[:] = 99.0  # what was sent stays as it was
    found["meanwhile"], found["later"] = plane.gather(np.array([10.0 * rank])).tolist(), wait().tolist()
    found["objects"] = plane.gather_objects((rank, "x" * rank, None))
    found["at zero"] = plane.gather_objects_at_zero(rank)
    found["broadcast"] = plane.broadcast_object({"from": rank})
    found["decided"] = plane.decide(lambda: (rank, "of rank 0"))
    found["refused"] = {name: error_of(partial(plane.decide, decision)) for name, decision in DECISIONS.items()}
    found["equal"] = plane.require_equal("the plan", (4, 2))
    found["odd"] = [error_of(lambda odd=odd: plane.require_equal("the plan", int(rank == odd))) for odd in range(3)]
    payloads = [Payload(rank, 10.0 * rank), Padding(3), Payload(rank + 0.5)]
    found["drawn"] = gather_payloads(plane, (2**47 + 1, rank, 7 - rank), payloads)
    found["taken"] = payloads[0].taken, payloads[2].taken
    late = Payload(1.0)
    found["other plan"] = error_of(lambda: gather_payloads(plane, (rank == 1, 0, 0), [late])), late.taken
    notes = SharedNotes(plane, 2)
    found["notes"] = [notes.exchange([rank * (step == 1), (step == 2) - rank]) for step in range(4)]
    found["last notes"] = notes.take(), notes.take()
    plane.close()
    plane.close()
    found["after the end"] = plane.gather_objects(rank)
    plane.close()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_agree(world_size):
    ranks, several = range(world_size), world_size > 1
    for rank, found in enumerate(run_ranks(_agrees, world_size, world_size)):
        refused = found.pop("refused")
        assert {name: error and error[0] for name, error in refused.items()} == {
            "an error": "KeyError",
            "one that cannot be received": "RuntimeError" if rank else "TwoPartsError",
            "the end of a loop": "RuntimeError",
            "the end of the process": "RuntimeError",
            "what cannot be sent": "TypeError" if several else None,
        }
        assert "no split" in refused["one that cannot be received"][1]
        assert "SystemExit(3)" in refused["the end of the process"][1]
        for odd, error in enumerate(found.pop("odd")):
            named = ", ".join(f"rank {r}: {int(r == odd)}" for r in ranks)
            assert (error is None) == (not several)
            assert error is None or (error[0] == "PlanMismatchError" and named in error[1])
        error, taken = found.pop("other plan")
        assert (error and error[0], taken) == (("PlanMismatchError", None) if several else (None, [[1.0]]))
        assert found == {
            "called": [("second", 0), ("first", 0)] if several else [],  # before there is another group
            "not contiguous": [(np.arange(6.0).reshape(2, 3).T + r).tolist() for r in ranks],
            "meanwhile": [[10.0 * r] for r in ranks],
            "later": [[r, r] for r in ranks],
            "objects": [(r, "x" * r, None) for r in ranks],
            "at zero": list(ranks) if rank == 0 else [],
            "broadcast": {"from": 0},
            "decided": (0, "of rank 0"),
            "equal": None,
            "drawn": [(r, 7 - r) for r in ranks],
            "taken": ([[r, 10.0 * r] for r in ranks], [[r + 0.5] for r in ranks]),
            "notes": [[0, 0], [0, 0], [world_size - 1, 0], [0, 1]],
            "last notes": ([0, 0], [0, 0]),
            "after the end": list(ranks),
        }


# numbers that are given once


def test_a_loader_worker_opens_the_store_of_the_job_if_it_can(tmp_path, monkeypatch):
    def sent(counter):
        return pickle.loads(pickle.dumps(counter))

    alone = SharedCounter.of_job(0, 1)
    assert list(islice(alone.numbers("key", 1, 2), 3)) == [1, 3, 5], "shared among its loader workers in turn"
    with pytest.raises(ValueError, match="num_workers"):
        next(sent(SharedCounter(dist.HashStore(), "prefix")).numbers("key"))
    job, found = dist.FileStore(str(tmp_path / "store"), 1), []
    for generation in range(2):  # workers that meet anew count anew
        monkeypatch.setenv(GENERATION, str(generation))
        members = MembersStore(dist.PrefixStore(f"generation/{generation}", job), lambda: False)
        store = dist.PrefixStore("0", members)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
        counter = SharedCounter.of_job(0, 2)
        found += [next(counter.numbers("key")), next(sent(counter).numbers("key"))]
    assert found == [0, 1, 0, 1]


# backends


def _bound(rank):
    """Lightning binds the default group to its GPU, whatever the backend."""
    dist.init_process_group("gloo")
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    buffer = torch.full((3,), float(rank))
    Topology(rank, ((0, 1), (2,))).all_reduce(buffer).wait()
    return buffer.tolist(), ControlPlane(rank, 3).gather_objects(rank)


def test_clusters_and_agreement_work_beside_a_default_group_that_is_bound_to_a_gpu():
    assert run_ranks(_bound, 3) == [([3.0, 3.0, 3.0], [0, 1, 2])] * 3


def _joins(rank, name, backends):
    if name == "HeteroAccelerator":
        chosen = InitProcessGroupKwargs(backend=backends[rank], timeout=WITHIN)
        HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(), kwargs_handlers=[chosen])
        return
    strategy = getattr(lightning_hetero, name)(process_group_backend=backends[rank], timeout=WITHIN)
    trainer_of(strategy, len(backends)).fit(Regressor(), DataLoader(Points(16), 2))


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("HeteroDDPStrategy", ("gloo", "nccl")),
        ("HeteroFSDPStrategy", ("cpu:gloo,cuda:nccl", "gloo", "gloo")),
        ("HeteroElasticStrategy", ("mpi", "gloo")),
        ("HeteroAccelerator", ("mpi", "gloo")),
        ("HeteroDDPStrategy", ("nccl", "nccl")),
    ],
    ids=["ddp", "fsdp", "elastic", "accelerate", "no GPU"],
)
def test_ranks_whose_backends_do_not_fit_are_refused_before_they_wait_for_each_other(name, backends):
    errors = run_ranks(_joins, len(backends), name, backends, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(rank, "ValueError") for rank in range(len(backends))]
    assert all("process_group_backend" in text for *_, text in errors)


# workers, and the plan that a run begins with


class Fixed(StaticPlanner):
    """Begins with one outcome, whatever the bounds."""

    def __init__(self, outcome):
        self.outcome = outcome

    def initial(self, context):
        return self.outcome


def known(*sizes):
    return Fixed(Proposal(BatchPlan(sum(sizes), sizes), "known"))


class Table:
    """A control plane that has heard of the other ranks already."""

    def __init__(self, *others):
        self.others = others

    def gather_objects(self, value):
        return [value, *self.others]


def workers(n=2, min_local=1, max_local=None, capacities=None, multiple=1):
    return Workers(tuple("abcd"[:n]), capacities or (1.0,) * n, min_local, max_local, multiple=multiple)


def test_workers_meet_with_the_largest_minimum_and_the_least_bound_of_each():
    others = [("a", 2.0, 2, 9, "V100"), ("b", 1.0, 1, NO_LIMIT, ""), ("a", 1.0, 1, 9, "")]
    met = Workers.gather(Table(*others), "a", 1.0, min_local=1, bounds=(12, None, 7), device="A100")
    assert met.identities == ("a", "a#1", "b", "a#2"), "two containers may have one host name and slot"
    assert (met.capacities, met.min_local, met.max_local) == ((1.0, 2.0, 1.0, 1.0), 2, (7, 9, NO_LIMIT, 9))
    assert (met.devices, met.world_size) == (("A100", "V100", "", ""), 4)
    assert Workers.gather(Table(others[1]), "a", 1.0, min_local=1, bounds=(None,)).max_local is None
    context = met.context(HeteroConfig(hysteresis=0.1), 40, accumulation=4)
    assert (context.total_batch_size, context.min_local, context.max_local) == (40, (2,) * 4, met.max_local)


@pytest.mark.parametrize(
    ("given", "total", "more", "expected"),
    [
        ({}, 9, {}, (5, 4)),
        ({"max_local": (2, 100)}, 9, {"planner": PerfModelPlanner()}, (2, 7)),
        ({}, 7, {"local_batch_sizes": [7, 0]}, (7, 0)),
        ({}, 8, {"planner": known(7, 1), "running": BatchPlan(8, (5, 3))}, None),
        ({}, 8, {"planner": known(7, 1), "running": BatchPlan(6, (5, 1))}, (7, 1)),
        ({}, 8, {"running": BatchPlan(8, (4, 4))}, None),
        ({"multiple": 4, "capacities": (3.0, 1.0)}, 12, {"planner": StaticPlanner()}, (8, 4)),
        ({"multiple": 4}, 12, {"planner": known(8, 4), "running": BatchPlan(12, (7, 5))}, (8, 4)),
        # refused, with the setting or the bounds in the error
        ({"min_local": 4}, 7, {}, "min_local_batch_size"),
        ({"max_local": (2, 3)}, 8, {}, r"\[2, 3\].* 2"),
        ({"min_local": 2}, 5, {"local_batch_sizes": [4, 1]}, "min_local_batch_size"),
        ({"max_local": (5, 5)}, 8, {"planner": PerfModelPlanner(), "running": BatchPlan(8, (6, 2))}, r"\[5, 5\]"),
        ({"multiple": 4}, 10, {}, "local_batch_multiple=4.* 8 or 12"),
        ({"multiple": 8, "max_local": (7, 9)}, 16, {}, "local_batch_multiple"),
        ({}, 8, {"planner": Fixed(BatchPlan(8, (6, 2)))}, "Fixed"),
        ({}, 8, {"planner": known(4, 2, 2)}, "2 workers"),
    ],
    ids=str,
)
def test_the_plan_that_a_run_begins_with(given, total, more, expected):
    more = dict(more)
    planner, running = more.pop("planner", None), more.pop("running", None)

    def begin():
        return workers(**given).initial_plan(HeteroConfig(**more), total, planner, running)

    if isinstance(expected, str):
        with pytest.raises((ValueError, TypeError), match=expected):
            begin()
    else:
        found = begin()
        assert (found and found.plan.local_batch_sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "high", "fitting", "multiple"),
    [
        ((6, 4), (5, NO_LIMIT), (5, 5), 1),
        ((6, 4, 2), (9, 3, 9), (7, 3, 2), 1),
        ((8, 0, 4), (6, 9, 9), (6, 0, 6), 1),  # one that was left out stays so
        ((8, 4), (7, 99), (4, 8), 4),
        ((8, 4, 4), (7, 99, 99), (4, 8, 4), 4),
    ],
)
def test_a_plan_beyond_a_bound_that_has_fallen_becomes_one_of_the_same_total(sizes, high, fitting, multiple):
    crew = workers(len(sizes), multiple=multiple).bounded((99,) * len(sizes)).bounded(high)
    assert crew.bounded((NO_LIMIT,) * len(sizes)).max_local == crew.max_local, "bounds only fall"
    proposal = crew.within_bounds(BatchPlan(sum(sizes), sizes))
    assert (proposal and proposal.plan.local_batch_sizes) == fitting
    room = sum(crew.max_local)
    assert (crew.has_room(room), crew.has_room(room + 1)) == (True, False)
    if fitting:
        with pytest.raises(ValueError, match=str(sum(crew.max_local[:1]))):
            crew.within_bounds(BatchPlan(room + multiple, (room + multiple, *[0] * (len(sizes) - 1))))


# when ranks look again

OTHER = Proposal(BatchPlan(3, (3,)), "smaller")


def steps_of(seconds, ranks=2):
    times = np.array(seconds, dtype=float)[:, None].repeat(ranks, axis=1)
    return StepObservations(*[np.zeros_like(times)] * 6, times)


@pytest.mark.parametrize(
    ("cost", "seconds", "decision", "steps"),
    [
        (0.2, [1.0], {}, 40),
        (0.201, [90.0, 1.0, 0.5], {}, 41),  # of the usual step
        (0.2, [], {}, 8),
        (0.0, [1.0], {}, 8),
        (0.0, [1.0], {"moving": True}, 4),  # while speeds change
        (99.0, [1.0], {}, 1000),
        (0.2, [1.0], {"proposal": OTHER}, 41),  # its first step is not observed
        (0.2, [1.0], {"soon": True}, 8),
        (0.2, [1.0], {"soon": True, "proposal": OTHER}, 8 + 5 + 1),
    ],
)
def test_looking_costs_half_a_percent_unless_a_decision_waits_for_it(cost, seconds, decision, steps):
    decision = Decision(None, **decision)
    seen = steps_of(seconds) if seconds else StepObservations.empty(2)
    for replan, expected in (("auto", steps), (50, 50)):
        assert SyncSchedule(replan).after(100, seen, cost, decision, ahead=5) == 100 + expected
    assert SyncSchedule("epoch").after(100, seen, cost, decision, ahead=5) > 2**60


@pytest.mark.parametrize("replan", ["auto", 4])
def test_an_epoch_begins_with_a_look_if_eight_steps_have_passed_since_the_last_one_that_may_do_as_much(replan):
    """As much: change the number of micro-batches, which no look within an epoch may."""
    schedule, first = SyncSchedule(replan), 6 if replan == "auto" else 4
    assert [schedule.due(step) for step in (first - 1, first)] == [False, True]
    assert [step for step in range(20) if schedule.due_at_epoch(step)] == list(range(8, 20))
    schedule.done(16, 20)
    assert [schedule.due(step) for step in (19, 20)] == [False, True]
    assert [schedule.due_at_epoch(step) for step in (23, 24)] == [False, True]
    assert schedule.due_at_epoch(16, micro_batches_move=True)
    schedule.done(16, 20, between_epochs=True)
    schedule.done(20, 24)
    assert [schedule.due_at_epoch(step, micro_batches_move=True) for step in (23, 24)] == [False, True]
    assert SyncSchedule("epoch").due_at_epoch(0, micro_batches_move=True)
    assert not SyncSchedule("epoch").due(2**40)


# what a run tells its user


@pytest.mark.parametrize("speaks", [True, False])
def test_each_thing_is_said_once_on_one_rank_and_a_loss_is_a_warning(caplog, speaks):
    caplog.set_level(logging.INFO, "lightning_hetero")
    notices = Notices(speaks=speaks)
    one, loss = NoEffect(("a=1",), "one worker", "Start more"), NoEffect(("b=2",), "dense", "Compress", loses=True)
    for _ in range(2):
        notices.say("100 %s of 5 %")
        notices.tell(iter([one, loss, NoEffect(("c=3",), "one worker", "Start more")]))
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [text for _, text in said] == notices.said
    assert [level for level, _ in said] == [logging.INFO, logging.INFO, logging.WARNING] * speaks
    assert not speaks or ("a=1" in said[1][1] and "c=3" in said[1][1])
