"""What trainings in one process leave behind: as much after many of them as after two."""

import gc
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.comm.agreement import group_lifetime
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.group_lifetime import (
    ended,
    free_group_last,
    go_on,
    leave_all,
    leave_ended,
    leave_soon,
)
from lightning_hetero.comm.collectives.topology import Topology
from tests.helpers import Points, Regressor, run_ranks, trainer_of

COMPRESSED = {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2), "staleness": 1}
HIERARCHY = {"hierarchy": [[0, 1], [2]]}
TRAININGS = 5


def wait_until_gone(reference):
    """A thread of gloo's may hold the last sum, and all that hangs on it, a moment longer than its caller does."""
    until = time.monotonic() + 20
    gc.collect()
    while reference() is not None and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()


def threads():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("Threads:") + 1])


def left(before=()):
    """Process groups, threads and open files of this process, and keys in the store that it shares with the others.

    A thread that ends by itself has 20 s to do so: until there are no more than after the second training ``before``.
    No rank goes on while another one counts.
    """
    until = time.monotonic() + 20
    gc.collect()
    while len(before) > 1 and threads() > before[1][1] and time.monotonic() < until:
        time.sleep(0.05)
    dist.barrier()
    keys = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return len(dist.distributed_c10d._world.pg_map), threads(), len(os.listdir("/proc/self/fd")), keys


class Owned:
    """What has groups, as far as it can be asked."""

    def __init__(self):
        self.calls = []

    def open(self):
        self.calls.append("open")

    def close(self):
        self.calls.append("close")


def test_groups_of_a_training_that_goes_on_are_not_left():
    over, goes_on = Owned(), Owned()
    ended(over, goes_on)
    ended(over)
    go_on(goes_on)
    leave_ended()
    leave_ended()
    assert (over.calls, goes_on.calls) == (["close"], ["open"])


def _left_soon(rank):
    """Groups and keys before, with a group that was made for nothing, and after the next control plane began."""
    dist.init_process_group("gloo")
    keys, counts = dist.distributed_c10d._get_default_store().num_keys, []

    def count():
        dist.barrier()
        counts.append((len(dist.distributed_c10d._world.pg_map), keys()))
        dist.barrier()

    first = ControlPlane(rank, 2)
    for step in (None, lambda: leave_soon(dist.new_group()), lambda: ControlPlane(rank, 2)):
        kept = step and step()
        count()
    assert first.gather_objects(rank) == kept.gather_objects(rank) == [0, 1]
    dist.destroy_process_group()
    return counts


def test_a_group_that_was_made_for_nothing_is_left_when_all_ranks_have_made_it():
    """Its keys in the store go with it, which another rank may need to connect."""
    for before, made, after in run_ranks(_left_soon, 2):
        assert (made[0] - before[0], after[0] - made[0]) == (1, 0), "one comes and one goes"
        assert made[1] > before[1]
        assert after[1] == made[1]


def wait_for(condition):
    """Whether it came true within half a minute."""
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def _leaves(rank, folder, stuck, dropped):
    """Rank 0 begins anew while a sum waits for rank 1, which takes no part until that is done."""
    looks = []
    group_lifetime.time = SimpleNamespace(sleep=lambda _: (looks.append(1), time.sleep(0.01)))
    dist.init_process_group("gloo")
    owner = ControlPlane(rank, 2)
    groups = {"default": dist.group.WORLD, "own": owner._group}
    dist.barrier()
    begun = folder / "begun"
    if rank == 1:
        seen = wait_for(begun.exists)
        del groups, owner
        leave_all()
        return seen
    waits = dist.all_reduce(torch.ones(1), group=groups[stuck], async_op=True)
    gone = {name: weakref.ref(group) for name, group in groups.items()}
    held = groups[stuck] if dropped == "held" else None
    del groups
    if dropped == "ended":
        ended(owner)
    if dropped != "late":
        del owner
    leave_all()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo", rank=0, world_size=1)
    assert dropped != "held" or wait_for(lambda: len(looks) > 1), "the thread has looked"
    del held
    if dropped == "late":
        del owner
        gc.collect()
        leave_ended()
    x = torch.ones(1)
    dist.all_reduce(x)
    is_stuck = not waits.is_completed()
    begun.touch()
    assert wait_for(lambda: "lightning_hetero-leave" not in {thread.name for thread in threading.enumerate()})
    return x.item(), is_stuck, [name for name, group in gone.items() if group() is not None]


@pytest.mark.parametrize("dropped", ["before", "ended", "held", "late"])
@pytest.mark.parametrize("stuck", ["default", "own"])
def test_a_worker_begins_anew_while_a_call_of_its_earlier_groups_is_stuck(tmp_path, stuck, dropped):
    """Whoever frees the last reference to a group waits for its calls: not the worker, for which all others wait."""
    first, seen = run_ranks(_leaves, 2, tmp_path, stuck, dropped)
    assert first == (1.0, True, [])
    assert seen


def test_what_refers_to_itself_is_freed_before_a_worker_begins_anew(monkeypatch):
    """As a model does under DDP, which holds a copy of all gradients."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    gc.disable()
    try:
        model = Owned()
        model.itself, gone = model, weakref.ref(model)
        del model
        leave_all()
    finally:
        gc.enable()
    assert gone() is None


def _freed(rank, front):
    """In which order the parts of a model are freed that outlives the default group."""
    freed, net = [], torch.nn.Linear(2, 2)
    if front == "accelerate":
        from lightning_hetero.accelerate import HeteroAccelerator

        accelerator = HeteroAccelerator(cpu=True)
        model, loader = accelerator.prepare(net, DataLoader(torch.ones(8, 2), 2))
        for x in loader:
            accelerator.backward(model(x).sum())
        accelerator.free_memory()
    else:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net)
        free_group_last(model)
        model(torch.ones(1, 2)).sum().backward()
    for name in ("reducer", "logger", "process_group"):
        weakref.finalize(getattr(model, name), freed.append, name)
    dist.destroy_process_group()
    del model
    gc.collect()
    return freed


@pytest.mark.parametrize("front", ["by hand", "accelerate"])
def test_a_model_keeps_its_group_until_its_reducer_is_gone(front):
    """A reducer that frees the group would hold the interpreter's lock and wait for a thread that needs it."""
    for freed in run_ranks(_freed, 2, front):
        assert set(freed[:2]) == {"reducer", "logger"}
        assert freed[2:] == ["process_group"]


def lightning(rank, world_size, settings, again=False, fails=False):
    """With a trainer each, or one for all; every other one may end in an error."""
    model, trainer, counts = Regressor(dtype=torch.float32), None, []
    for i in range(TRAININGS):
        if trainer is None or not again:
            trainer = trainer_of(HeteroDDPStrategy(**settings), world_size, max_epochs=0)
        trainer.fit_loop.max_epochs += 1
        model.on_train_batch_end = lambda *_, bad=fails and i % 2: 1 // (not bad)
        with suppress(ZeroDivisionError):
            trainer.fit(model, DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True))
        counts.append(left(counts))
    return counts


def fabric(rank, world_size, settings):
    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    counts = []
    for _ in range(TRAININGS):
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=HeteroDDPStrategy(**settings))
        fabric.launch()
        model = torch.nn.Linear(5, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, *_ in fabric.setup_dataloaders(DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True)):
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        strategy = weakref.ref(fabric._strategy)
        del fabric, model, optimizer
        wait_until_gone(strategy)
        counts.append(left(counts))
    return counts


def accelerate(rank, world_size, settings, dropped=False):
    """``end_training`` would end the process group, so that no other training could follow.

    One that is only dropped, in the middle of a pass, ends when the next one begins.
    """
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    counts = []
    for _ in range(TRAININGS):
        accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings))
        model = torch.nn.Linear(5, 1)
        loader = DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
        for x, *_ in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if dropped and accelerator.hetero_session.position[1] == 5:
                break
        if dropped:
            counts.append(left(counts))
            continue
        accelerator.free_memory()
        session = weakref.ref(accelerator.hetero_session)
        del accelerator, model, optimizer, loader
        wait_until_gone(session)
        counts.append(left(counts))
    return counts


def elastic(rank, world_size, settings):
    """All trainers are kept, and with them what they own."""
    from lightning_hetero import HeteroElasticStrategy

    counts, kept = [], []
    for _ in range(TRAININGS):
        trainer = trainer_of(HeteroElasticStrategy(mega_batch_batches=4, **settings), world_size, max_epochs=1)
        kept.append(trainer)
        trainer.fit(Regressor(dtype=torch.float32), DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True))
        counts.append(left(counts))
    return counts


class Sharded(Regressor):
    """Keeps no gradients, of which a rank has shards."""

    def on_before_optimizer_step(self, optimizer):
        pass


def sharded(rank, world_size, settings):
    from lightning_hetero import HeteroFSDPStrategy

    counts = []
    for _ in range(TRAININGS):
        trainer = trainer_of(HeteroFSDPStrategy(**settings), world_size, max_epochs=1)
        trainer.fit(Sharded(dtype=torch.float32), DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True))
        counts.append(left(counts))
    return counts


@pytest.mark.parametrize(
    ("train", "settings", "more"),
    [
        (lightning, {}, ()),
        (lightning, COMPRESSED, ()),
        (lightning, {**HIERARCHY, "staleness": 1}, ()),
        (lightning, {**HIERARCHY, **COMPRESSED}, (True,)),
        (lightning, {**HIERARCHY, **COMPRESSED}, (False, True)),
        (fabric, HIERARCHY, ()),
        (accelerate, HIERARCHY, ()),
        (accelerate, {"replan": 2}, (True,)),
        (elastic, {}, ()),
        (sharded, {}, ()),
        (sharded, {"replicate_size": 2}, ()),
    ],
    ids=[
        *("lightning", "compressed", "hierarchy", "again", "fails", "fabric", "accelerate", "dropped", "elastic"),
        *("sharded", "replicas"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_many_trainings_in_one_process_leave_as_much_as_two(train, settings, more):
    """Sockets are closed a little later, by the other end."""
    world_size = {"hierarchy": 3, "replicate_size": 4}.get(next(iter(settings), ""), 2)
    for counts in run_ranks(train, world_size, world_size, settings, *more):
        assert len({count[0] for count in counts[1:]}) == 1, counts
        assert max(count[1] for count in counts[2:]) <= counts[1][1], counts
        assert counts[-1][2] < counts[1][2] + 10, counts
        assert counts[-1][3] == counts[1][3], counts


def _late(rank):
    """A training goes on although another one was there meanwhile, and one saves something behind its end."""
    dist.init_process_group("gloo")
    first, hierarchy = ControlPlane(rank, 3), Topology(rank, ((0, 1), (2,)))
    x = torch.ones(2)
    hierarchy.all_reduce(x).wait()
    ended(first, hierarchy)
    ended(first, hierarchy)
    kept = left()[0]
    other = ControlPlane(rank, 3)
    alone = left()[0]
    everyone = first.gather_objects(rank)
    go_on(first, hierarchy)
    hierarchy.all_reduce(x).wait()
    again = left()[0]
    ControlPlane(rank, 3)
    after = other.gather_objects(rank) == everyone == first.gather_objects(rank) == [0, 1, 2]
    dist.destroy_process_group()
    return kept, alone, again, after, x.tolist()


def test_a_training_that_has_ended_can_go_on_and_agree_on_something():
    first, second, third = run_ranks(_late, 3)
    assert first == (5, 2, 6, True, [9.0, 9.0])
    assert second == (4, 2, 5, True, [9.0, 9.0])
    assert third == (3, 2, 4, True, [9.0, 9.0])


def _destroyed(rank, strategy, model):
    """Train again after the default group was destroyed, as a script does that makes one of its own."""
    for attempt in range(2):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + attempt)
        loader = DataLoader(Points(48, dtype=torch.float32), 4, shuffle=True)
        trainer_of(strategy, 2, max_epochs=1).fit(model(dtype=torch.float32), loader)
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize(("strategy", "model"), [("hetero_ddp", Regressor), ("hetero_fsdp", Sharded)])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_training_begins_after_the_default_group_was_destroyed(strategy, model):
    run_ranks(_destroyed, 2, strategy, model)
