"""The DDP hook against DDP itself: averages, a user's hook inside ours, norms, the error of a direct backward."""

import inspect
import math
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.collectives import bucket_futures
from lightning_hetero.comm.gradients.averager import GradientAverager
from lightning_hetero.comm.gradients.ddp_hook import DIRECT_BACKWARD, BackwardCheck, HookState, gradient_hook
from lightning_hetero.comm.gradients.squared_norms import GradientNorms
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.optim import AdamPreconditioner
from tests.helpers import run_ranks, without_address

STEPS, WIDTH = 3, 600  # wider than the megabyte of DDP's first bucket
TINY = 1e-4  # MB: one bucket for each parameter that does not fit into the first


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batches(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(STEPS)]


def loss_of(model, x):
    return model(x).square().mean()


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy()


def _gradients(rank, hook, ours, cap):
    """Averaged gradient of each step; ``ours`` puts ``hook`` inside our own."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build(), bucket_cap_mb=cap)
    state = HookState(StepTimer(HostClock()), dist.get_world_size())
    state.use_hook(hook)
    if ours:
        model.register_comm_hook(state, gradient_hook)
    elif hook is not None:
        model.register_comm_hook(None, hook)
    gradients = []
    for x in batches(rank):
        model.zero_grad()
        loss_of(model, x).backward()
        gradients.append(flat(model))
    return np.stack(gradients)


@pytest.mark.parametrize("cap", [25, TINY])
@pytest.mark.parametrize("hook", [None, fp16_compress_hook, bf16_compress_hook], ids=without_address)
def test_average_is_that_of_ddp_with_the_same_hook(hook, cap):
    """To the last bit, also with three ranks, by whose number a division rounds otherwise than a multiplication."""
    ranks = 3 if hook is None else 2
    ours = run_ranks(_gradients, ranks, hook, True, cap)
    np.testing.assert_array_equal(ours[0], ours[1])
    if hook is not bf16_compress_hook:  # which torch registers with NCCL only
        np.testing.assert_array_equal(ours[0], run_ranks(_gradients, ranks, hook, False, cap)[0])
    exact = []
    for step in range(STEPS):
        model = build()
        loss_of(model, torch.cat([batches(rank)[step] for rank in range(ranks)])).backward()
        exact.append(flat(model))
    np.testing.assert_allclose(ours[0], exact, atol=1e-6 if hook is None else 1e-2)
    assert hook is None or np.abs(ours[0] - exact).max() > 1e-6, "the hook was not used"


def _norms(rank, cap, hook):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build().double(), bucket_cap_mb=cap)
    state = HookState(StepTimer(HostClock()), 2)
    state.use_hook(hook)
    state.squares.want(True)
    model.register_comm_hook(state, gradient_hook)
    rows = []
    for x in batches(rank):
        alone = build().double()
        loss_of(alone, x.double()).backward()
        model.zero_grad()
        loss_of(model, x.double()).backward()
        buckets = len(state.squares.averaged)
        local, averaged = (torch.stack(squares).sum() for squares in state.squares.take())
        assert local.dtype == averaged.dtype == torch.float64
        rows.append([buckets, local, (flat(alone) ** 2).sum(), averaged, (flat(model) ** 2).sum()])
        assert state.squares.take() is None
    return np.array(rows, dtype=float)


@pytest.mark.parametrize(("cap", "hook"), [(25, None), (TINY, None), (TINY, bf16_compress_hook)], ids=without_address)
def test_squared_norms_are_those_of_the_gradients(cap, hook):
    """Before averaging of this rank's own gradient, after it of the one that the optimizer sees."""
    for rows in run_ranks(_norms, 2, cap, hook):
        assert (rows[1:, 0] > 2).all() if cap == TINY else (rows[1:, 0] <= 2).all()
        np.testing.assert_allclose(rows[:, 1], rows[:, 2], rtol=1e-12)
        np.testing.assert_allclose(rows[:, 3], rows[:, 4], rtol=1e-12)


class Bag(nn.Module):
    """Sparse gradients of rows that several samples share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.bag, self.out = nn.EmbeddingBag(7, 4, mode="sum", sparse=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.bag((x * 10).long().abs() % 7))


def _sparse(rank, ours, parts):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Bag().double())
    state = HookState(StepTimer(HostClock()), 2)
    state.squares.want(parts is not None)
    state.squares.norms.divide(rank, parts or 1)
    if ours:
        model.register_comm_hook(state, gradient_hook)
    found, squares = [], []
    for x in batches(rank):
        model.zero_grad()
        loss_of(model, x).backward()
        assert model.module.bag.weight.grad.is_sparse
        found.append(torch.cat([p.grad.to_dense().flatten() for p in model.parameters()]).numpy())
        if parts is not None:
            squares.append([float(torch.stack(each).sum()) for each in state.squares.take()])
    return np.stack(found), np.array(squares), state.num_bytes


@pytest.mark.parametrize("parts", [None, 1, 2])
def test_sparse_gradients_are_averaged_as_by_ddp_and_their_norms_are_known(parts):
    """Norms after averaging are of the whole gradient, or of each rank's part of it."""
    (ours, squares, num_bytes), (others, theirs, _) = run_ranks(_sparse, 2, True, parts)
    np.testing.assert_array_equal(ours, others)
    np.testing.assert_allclose(ours, run_ranks(_sparse, 2, False, None)[0][0], rtol=1e-14)
    assert num_bytes == STEPS * (30 * (8 + 4 * 8) + 5 * 8), "rows with their numbers, and a dense layer"
    if parts is not None:
        after = (squares + theirs)[:, 1] / (2 if parts == 1 else 1)
        np.testing.assert_allclose(after, (ours**2).sum(1), rtol=1e-12)


def _observed(rank):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build(), bucket_cap_mb=TINY)
    observer = StepTimer(HostClock())
    state = HookState(observer, 2)
    model.register_comm_hook(state, gradient_hook)
    for _ in range(6):
        observer.begin_step(5, regular=True)
        model.zero_grad()
        loss = loss_of(model, batches(rank)[0])
        observer.begin_backward()
        loss.backward()
        observer.end_backward()
        observer.end_step()
    table = observer.take()
    steps = table[~np.isnan(table[:, 0])]
    return steps[:, 0].tolist(), StepObservations.from_array(steps[:, None, 1:]), sum(1 for _ in model.parameters())


def test_every_bucket_is_timed():
    for steps, seen, parameters in run_ranks(_observed, 2):
        assert steps == [4, 5, 6]
        assert (seen.forward > 0).all()
        assert (seen.first_bucket > 0).all()
        assert (seen.first_bucket < seen.backward).all()
        assert (seen.overlapped_sync >= 0).all()
        assert (seen.last_sync >= 0).all()
        assert (seen.step_time > seen.backward).all()
        assert 2 < seen.bucket_ends.shape[2] <= parameters
        assert (seen.bucket_ends > seen.first_bucket[..., None]).all()


def test_signature_is_the_one_that_torch_asks_for():
    """Torch compares annotations by identity: they must be types, not strings."""
    parameters = inspect.signature(gradient_hook).parameters
    assert list(parameters) == ["state", "bucket"]
    assert parameters["bucket"].annotation is dist.GradBucket
    assert inspect.signature(gradient_hook).return_annotation == torch.futures.Future[torch.Tensor]


def _direct(rank, weighted, through):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    state = HookState(StepTimer(HostClock()), 2, weighted=weighted)
    model.register_comm_hook(state, gradient_hook)
    with state.backward() if through else nullcontext():
        loss_of(model, batches(rank)[0]).backward()


def test_backward_that_bypasses_the_weighting_is_an_error():
    errors = run_ranks(_direct, 2, True, False, expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "RuntimeError"), (1, "RuntimeError")]
    assert all(DIRECT_BACKWARD in message for *_, message in errors)


@pytest.mark.parametrize(("weighted", "through"), [(True, True), (False, False)])
def test_weighted_or_not_to_be_weighted_is_no_error(weighted, through):
    run_ranks(_direct, 2, weighted, through)


def state_of(**given):
    return HookState(StepTimer(HostClock()), 2, **given)


def test_a_bucket_whose_hook_failed_is_known_until_the_next_backward_pass():
    """Nobody can say whether it was sent."""
    state = HookState(StepTimer(HostClock()), 1)
    state.begin_reduction(8)
    assert state.backwards.sending
    with state.backward():
        assert not state.backwards.sending
    state.begin_reduction(8)
    state.hold(Held())
    assert not state.backwards.sending


def test_settling_waits_for_callbacks_of_buckets_and_of_futures_in_front_of_them(monkeypatch):
    monkeypatch.setattr(bucket_futures, "keep_groups", lambda: None)
    state, callback, never = HookState(StepTimer(HostClock()), 1), Held(), torch.futures.Future()
    state.hold(callback)
    waited = [time_of(state.settle)]
    del callback
    futures = state.let_fail()
    futures.stand_in(never, torch.device("cpu"))
    waited.append(time_of(state.settle))
    futures.fail("x", patience_s=0.0)
    waited.append(time_of(state.settle))
    assert [taken >= 0.2 for taken in waited] == [True, True, False]


def time_of(settle):
    began = time.monotonic()
    settle(timeout=0.2)
    return time.monotonic() - began


class Held:
    """A callback that nobody calls."""


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_backward_pass_inside_went_through_the_strategy(fails):
    state = state_of(weighted=True)
    with suppress(ZeroDivisionError), state.backward():
        state.begin_bucket(torch.ones(2), first=True)
        1 / (not fails)
    with pytest.raises(RuntimeError, match="called directly"):
        state.begin_bucket(torch.ones(2), first=True)


def test_every_optimizer_step_needs_a_backward_pass_since_the_one_before():
    check = BackwardCheck()
    check.begin_batch()
    check.count()
    check.begin_batch()  # the next one of an accumulation window
    check.step()
    check.step()  # another optimizer on the same gradients
    check.begin_batch()
    with pytest.raises(RuntimeError, match="called directly"):
        check.step()


def test_a_step_that_was_left_out_is_over_with_the_first_bucket_of_the_next():
    state = state_of()
    assert not state.take_fired()
    state.begin_bucket(torch.ones(2), first=True)
    state.skip_step()
    state.begin_bucket(torch.ones(2), first=False)
    assert state.step_skipped
    assert state.take_fired()
    assert not state.take_fired(), "no bucket was averaged since"
    state.begin_bucket(torch.ones(2), first=True)
    assert not state.step_skipped


def test_what_an_averager_left_out_counts_too():
    state = state_of()
    state.active.flags.skip()
    assert state.step_skipped


def test_a_checkpoint_waits_for_who_takes_it_once():
    state, held = state_of(), {"delayed": ["w"], "sums": {"w": torch.ones(2)}}
    state.load_stale_state(held)
    assert state.stale_state() is held, "it is saved again where no model has come"
    assert state.take_restored() is held
    assert state.take_restored() == {}, "its sums would be applied twice"
    assert state.stale_state() == {}


def test_all_ways_of_gradients_have_process_groups_to_leave():
    state, way, stale = state_of(), SimpleNamespace(flat=True), SimpleNamespace()
    assert state.topologies == []
    state.set_staleness(SimpleNamespace(topology=stale))
    assert state.topologies == [stale]
    state = state_of(topology=way)
    state.set_staleness(SimpleNamespace(topology=None))
    assert state.topologies == [way]


def _paid(rank):
    """Squared norms of a step whose sum holds what an earlier run had not sent."""
    dist.init_process_group("gloo")
    model, alone = DistributedDataParallel(build().double()), build().double()
    state = HookState(StepTimer(HostClock()), 2)
    state.squares.want(True)
    state.pay_out(lambda bucket: bool(bucket.buffer().add_(1.0).any()) and bucket.is_last())
    model.register_comm_hook(state, gradient_hook)
    for replica in (alone, model):
        loss_of(replica, batches(rank)[0].double()).backward()
    local, averaged = (float(torch.stack(squares).sum()) for squares in state.squares.take())
    return local, (flat(alone) ** 2).sum(), averaged, (flat(model) ** 2).sum(), state.residual_payout is None


def test_norms_are_without_what_an_earlier_run_had_not_sent():
    for local, own, averaged, seen, over in run_ranks(_paid, 2):
        assert local == pytest.approx(own, rel=1e-12)
        assert averaged == pytest.approx(seen, rel=1e-12)
        assert over, "it is paid out once"


def test_preconditioned_norms_follow_the_order_in_memory():
    """DDP keeps a parameter's own order (channels last) in its buckets."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    gradient, divisor = torch.randn(4, 3, 2, 2), torch.rand(4, 3, 2, 2) + 0.5
    flat = torch.empty(48)
    flat.as_strided(weight.size(), weight.stride()).copy_(gradient)
    adam = torch.optim.Adam([weight])
    moment = (divisor - 1e-8).square().contiguous(memory_format=torch.channels_last)
    adam.state[weight] = {"step": torch.tensor(math.inf), "exp_avg_sq": moment}  # 1 - 0.999^inf = 1
    norms = GradientNorms(AdamPreconditioner([adam]))
    (value,) = norms.of_bucket(torch.cat([torch.zeros(8), flat])[8:], lambda: [weight])
    torch.testing.assert_close(value, (gradient / divisor).square().sum())


def test_squared_norms_of_large_buckets_are_exact():
    """A float32 sum over millions of elements in one go is wrong in the fourth digit, as the noise may be."""
    flat = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = float(flat.double().square().sum())
    seen = float(torch.stack(GradientNorms().of_bucket(flat, list)).double().sum())
    assert seen == pytest.approx(exact, rel=2e-5)
    in_place = torch.nn.Parameter(flat)
    in_place.grad = flat
    assert float(GradientNorms().of_parameters([in_place])[0]) == pytest.approx(exact, rel=2e-5)


class Together(GradientAverager):
    """All buckets travel with the last one, and arrive when the test says so."""

    waits = False

    def __init__(self):
        super().__init__(2)
        self.flags.begin(exact=False, single_message=True)
        self.under_way = []

    def average(self, bucket, squares=None):
        self.under_way.append(torch.futures.Future())
        return self.under_way[-1]


def test_of_a_single_message_only_the_wait_for_the_last_bucket_is_timed():
    """The other buckets wait for that one; what they wait is no communication of their own."""
    done, averager, numbers = [], Together(), iter(range(3))
    observer = SimpleNamespace(bucket_ready=numbers.__next__, bucket_done=done.append)
    state = HookState(observer, 2, averager=averager)
    for i in range(3):
        bucket = SimpleNamespace(buffer=lambda: torch.ones(2), index=lambda i=i: i, is_last=lambda i=i: i == 2)
        gradient_hook(state, bucket)
    assert done == [0, 1]
    for future in averager.under_way:
        future.set_result(torch.ones(2))
    assert done == [0, 1, 2]
