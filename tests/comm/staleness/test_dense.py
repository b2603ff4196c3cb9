"""Delayed sums in DDP's hook, by hand: each is applied once, a step later, on all ranks alike, whatever changes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.link.bandwidth import sum_bytes
from tests.helpers import run_ranks

STEPS, TINY = 7, 1e-5  # MB: one bucket for each parameter after the first step
ALL = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
INPUT = ALL[:2]


class Crossed(nn.Module):
    """Layers are not listed in the order in which they are used, so that DDP's buckets change after the first step."""

    def __init__(self):
        super().__init__()
        for name, sizes in (("2", (9, 8)), ("4", (8, 1)), ("0", (6, 9))):
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, x):
        for name in ("0", "2"):
            x = self.get_submodule(name)(x).tanh()
        return self.get_submodule("4")(x)


def build():
    torch.manual_seed(3)
    return Crossed().double()


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def loss_of(model, x):
    return model(x).square().mean()


def gradients(model, world_size, step):
    """Mean over ranks of each parameter's gradient."""
    model.zero_grad()
    loss_of(model, torch.cat([batch(rank, step) for rank in range(world_size)])).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def by_hand(schedule, world_size, steps=STEPS):
    """What the optimizer must get in each step, and what is owed at the end."""
    model, owed, given, delayed = build(), {}, [], ()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        delayed = schedule.get(step, delayed)
        now = gradients(model, world_size, step)
        for name, p in model.named_parameters():
            held = owed.pop(name, torch.zeros_like(p))
            if name in delayed:
                p.grad, owed[name] = held, now[name]
            else:
                p.grad = now[name] + held
        given.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
        optimizer.step()
    return np.stack(given), {name: value.flatten().numpy() for name, value in owed.items()}


def start(world_size, *, cap=TINY, limit=1, restored=None, static_graph=False, bucket_view=False):
    """DDP with our hook on this rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(
        build(), bucket_cap_mb=cap, static_graph=static_graph, gradient_as_bucket_view=bucket_view
    )
    state = HookState(StepTimer(HostClock()), world_size)
    staleness = DenseStaleAverager(
        limit,
        dict(model.module.named_parameters()),
        world_size=world_size,
        clock=HostClock(),
        topology=Topology.flat_over(dist.get_rank(), world_size).with_own_groups(),
        priority=True,
        restored=restored,
    )
    state.set_staleness(staleness)
    model.register_comm_hook(state, gradient_hook)
    return model, staleness


def _train(rank, world_size, schedule, kwargs):
    model, staleness = start(world_size, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    given = []
    for step in range(STEPS):
        if step in schedule:
            staleness.make_stale(schedule[step])
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        given.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy())
        optimizer.step()
    saved = staleness.state_dict()
    owed = {name: value.numpy() for name, value in staleness.drain().items()}
    assert staleness.drain() == {}, "a sum was handed out twice"
    assert {n: v.tolist() for n, v in owed.items()} == {n: v.tolist() for n, v in saved.get("sums", {}).items()}
    return np.stack(given), owed


def test_many_ranks_time_fewer_steps_of_each():
    averager = DenseStaleAverager(1, {"w": torch.zeros(8)}, world_size=4000, clock=HostClock())
    assert averager._timer.take(2).shape == (16, 4)


def check(schedule, world_size=2, **kwargs):
    expected, owed = by_hand(schedule, world_size)
    results = run_ranks(_train, world_size, world_size, schedule, kwargs)
    for given, left in results:
        np.testing.assert_array_equal(given, results[0][0])
        np.testing.assert_allclose(given, expected, rtol=1e-12, atol=1e-15)
        assert set(left) == set(owed)
        for name, value in owed.items():
            np.testing.assert_allclose(left[name], value, rtol=1e-12, atol=1e-15)
            np.testing.assert_array_equal(left[name], results[0][1][name])


SCHEDULES = {
    "never": {},
    "some from the first step": {0: INPUT},
    "everything from the first step, over the new layout of buckets": {0: ALL},
    "everything": {2: ALL},
    "more, less, none, again": {1: INPUT, 3: ALL, 4: ["0.weight"], 5: [], 6: ALL},
    "part of a bucket": {2: ["0.weight", "4.bias"]},
}


@pytest.mark.parametrize("cap", [25, TINY], ids=["one bucket", "many"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_sum_is_applied_once_and_a_step_late(schedule, cap):
    check(schedule, cap=cap)


def test_three_ranks():
    check(SCHEDULES["more, less, none, again"], 3)


@pytest.mark.parametrize("kwargs", [{"static_graph": True}, {"bucket_view": True}], ids=str)
def test_kinds_of_ddp(kwargs):
    check({0: INPUT, 4: ALL}, **kwargs)


def _resumed(rank, cut, cap):
    """Saved after ``cut`` steps and continued by another DDP whose buckets are laid out as at the beginning."""
    model, staleness = start(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    staleness.make_stale(INPUT)
    given = []
    for step in range(STEPS):
        if step == cut:
            restored = staleness.state_dict()
            assert set(restored["sums"]) == set(INPUT)
            state = HookState(StepTimer(HostClock()), 2)
            model = DistributedDataParallel(model.module, bucket_cap_mb=cap)
            names = dict(model.module.named_parameters())
            state.set_staleness(DenseStaleAverager(1, names, world_size=2, clock=HostClock(), restored=restored))
            model.register_comm_hook(state, gradient_hook)
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        given.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy())
        optimizer.step()
    return np.stack(given)


def _resumed_at_each(rank, cuts, cap):
    return [_resumed(rank, cut, cap) for cut in cuts]


@pytest.mark.parametrize(("cuts", "cap"), [((1, 4), 25), (range(1, STEPS), TINY)], ids=["one bucket", "many"])
def test_state_continues_identically(cuts, cap):
    whole = run_ranks(_train, 2, 2, {0: INPUT}, {})
    for (given, _), continued in zip(whole, run_ranks(_resumed_at_each, 2, cuts, cap), strict=True):
        for each in continued:
            np.testing.assert_array_equal(given, each)


def _kinds(rank, schedule, cap=TINY):
    model, staleness = start(2, cap=cap)
    found = []
    for step in range(STEPS):
        if step in schedule:
            staleness.make_stale(schedule[step])
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        found.append(staleness.step_kind)
    return found


def test_a_step_says_what_it_delayed_and_that_it_holds_the_sums_of_two():
    some, everything = frozenset(INPUT), frozenset(ALL)
    expected = [frozenset(), some, some, everything, None, frozenset(), everything]
    for kinds in run_ranks(_kinds, 2, {1: INPUT, 3: ALL, 4: [], 6: ALL}):
        assert kinds == expected


def _wrong(rank, limit, names):
    staleness = start(2, limit=limit)[1]
    dist.barrier()
    staleness.make_stale(names)


@pytest.mark.parametrize(("limit", "names", "says"), [(1, ["5.weight"], "named_parameters"), (0, INPUT, "staleness=1")])
def test_wrong_delays_are_refused_on_every_rank(limit, names, says):
    errors = run_ranks(_wrong, 2, limit, names, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(says in message for *_, message in errors)


@pytest.mark.parametrize(("limit", "delayed"), [(0, set()), (1, {"w"})])
def test_a_checkpoint_delays_what_is_trained_and_only_with_staleness(limit, delayed):
    """Its sums are owed with and without."""
    state = {"delayed": ["gone", "w"], "sums": {"w": torch.ones(8)}, "rate": None}
    averager = DenseStaleAverager(limit, {"w": torch.zeros(8)}, world_size=2, clock=HostClock(), restored=state)
    assert averager.stale == delayed
    assert set(averager.drain()) == {"w"}


def test_a_sum_crosses_the_link_once_for_each_cluster():
    parameters = {"w": (w := torch.zeros(8))}
    bucket = SimpleNamespace(index=lambda: 0, parameters=lambda: [w], buffer=lambda: w)
    found = []
    for way in (None, SimpleNamespace(size=2)):
        averager = DenseStaleAverager(1, parameters, world_size=4, clock=HostClock(), synchronous=way)
        averager._bucket(bucket)
        found += averager._sent_bytes()
    assert found == [sum_bytes(32, 4), sum_bytes(32, 2)]
    assert found[1] < found[0]


def test_what_is_owed_of_undone_steps_is_discarded_when_a_checkpoint_is_loaded():
    state = {"delayed": ["w"], "sums": {"w": torch.ones(8)}, "rate": None}
    averager = DenseStaleAverager(1, {"w": torch.zeros(8)}, world_size=2, clock=HostClock(), restored=state)
    averager.load_state_dict({})
    assert averager.stale == frozenset()
    assert averager.drain() == {}


def test_a_bucket_of_which_a_part_stays_stale_holds_sums_of_no_other_kind():
    """What it owes to parameters that are stale again is applied as their sum of the step before."""
    some = frozenset(INPUT)
    for kinds in run_ranks(_kinds, 2, {1: INPUT, 4: []}, 25):
        assert kinds == [frozenset(), some, some, some, None, frozenset(), frozenset()]
