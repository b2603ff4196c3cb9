"""The hook in DDP against DDP itself: averages, hooks of the user's, norms, marks, buffers, backward passes."""

import copy
import gc
import pickle
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from lightning_hetero.comm.gradients.buffer_sync import time_buffers
from lightning_hetero.comm.gradients.ddp_hook import BackwardCheck, HookState, gradient_hook
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from tests.gradients.runs import ALL, TINY, Run, Way
from tests.ranks import run_ranks
from tests.timing.clocks import Hand

WIDTH = 600  # wider than the megabyte of DDP's first bucket


def state_of(observer=None, **given):
    return HookState(observer or StepTimer(HostClock()), dist.get_world_size() if dist.is_initialized() else 2, **given)


class Bag(nn.Module):
    """Sparse gradients of rows that several samples share."""

    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(7, 4, mode="sum", sparse=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.bag((x * 10).long().abs() % 7))


def wide():
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def _batch(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def gradients(model):
    return torch.cat([p.grad.to_dense().flatten() for p in model.parameters()]).numpy().copy()


def _averaged(rank, cases):
    """Averaged gradients of some steps, by DDP and by our hook in it, and norms before and after."""
    dist.init_process_group("gloo")
    found = {}
    for name, (make, hook, cap, parts) in cases.items():
        rows, seen = {True: [], False: []}, []
        for ours in (True, False):
            torch.manual_seed(3)
            model = DistributedDataParallel(make().double(), bucket_cap_mb=cap)
            state = state_of()
            state.use_hook(hook)
            state.squares.norms.divide(rank, parts)
            state.squares.want(True)
            if ours:
                model.register_comm_hook(state, gradient_hook)
            elif hook is fp16_compress_hook:
                model.register_comm_hook(None, hook)
            for step in range(3):
                alone = copy.deepcopy(model.module)
                for replica in (alone, model):
                    replica.zero_grad()
                    replica(_batch(rank, step)).square().mean().backward()
                rows[ours].append(gradients(model))
                if ours:
                    buckets = len(state.squares.local)
                    local, averaged = (float(torch.stack(part).sum()) for part in state.squares.take())
                    assert state.squares.take() is None
                    seen.append((buckets, local, (gradients(alone) ** 2).sum(), averaged, state.num_bytes))
        found[name] = np.stack(rows[True]), np.stack(rows[False]), np.array(seen)
    return found


AVERAGED = {
    "one bucket": (wide, None, 25, 1),
    "a bucket for each parameter": (wide, None, TINY, 1),
    "halves": (wide, fp16_compress_hook, 25, 1),
    "halves, a bucket for each parameter": (wide, bf16_compress_hook, TINY, 1),
    "sparse rows": (Bag, None, 25, 1),
    "norms in parts": (wide, None, 25, 3),
    "norms in parts of sparse rows": (Bag, None, TINY, 3),
}


@pytest.fixture(scope="module")
def averaged():
    return run_ranks(_averaged, 3, AVERAGED)


@pytest.mark.parametrize("name", AVERAGED)
def test_average_is_that_of_ddp_with_the_same_hook(name, averaged):
    """To the last bit, also with three ranks, by whose number a division rounds otherwise than a multiplication."""
    ours = averaged[0][name][0]
    for result in averaged:
        np.testing.assert_array_equal(result[name][0], ours)
        if AVERAGED[name][1] is bf16_compress_hook:  # which torch registers with NCCL only
            np.testing.assert_allclose(result[name][1], ours, atol=2e-2)
            assert (result[name][1] != ours).any(), "the hook was not used"
        elif AVERAGED[name][0] is Bag:
            np.testing.assert_allclose(result[name][1], ours, rtol=1e-14)
        else:
            np.testing.assert_array_equal(result[name][1], ours)


@pytest.mark.parametrize("name", AVERAGED)
def test_squared_norms_are_those_of_the_gradients(name, averaged):
    """Before averaging of this rank's own gradient, after it of the one that the optimizer sees, or of a part of it."""
    *_, parts = AVERAGED[name]
    seen = np.stack([result[name][2] for result in averaged])
    np.testing.assert_allclose(seen[:, :, 1], seen[:, :, 2], rtol=1e-12)
    after = seen[:, :, 3].sum(0) if parts > 1 else seen[:, :, 3]
    np.testing.assert_allclose(after, np.broadcast_to((averaged[0][name][0] ** 2).sum(1), after.shape), rtol=1e-12)
    make, _, cap, _ = AVERAGED[name]
    assert (seen[:, 1:, 0] > 3).all() == (make is wide and cap == TINY)
    if make is Bag:  # rows with their numbers, and a dense layer
        assert seen[0, -1, 4] == 3 * (30 * (8 + 4 * 8) + 5 * 8)
    else:
        assert seen[0, -1, 4] == 3 * 8 * averaged[0][name][0].shape[1]


def _norms(rank, ways):
    """Norms of steps of some of which a part holds sums of the step before."""
    found = {}
    for name, (way, payout) in ways.items():
        run, rows = Run(rank, way), []
        run.hook.squares.want(True)
        for step in range(5):
            if payout:
                run.hook.pay_out(lambda bucket: bool(bucket.buffer().add_(1.0).any()) and bucket.is_last())
            run.step(step)
            local, averaged = (float(torch.stack(part).sum()) if part else 0.0 for part in run.hook.squares.take())
            stale = run.hook.squares.take_stale()
            rows.append((local, averaged, float(torch.stack(stale).sum()) if stale else 0.0))
            payout = run.hook.residual_payout
        found[name] = np.array(rows), run.seen["own"], run.seen["given"], run.seen["kind"], payout is None
        run.close()
    return found


NORMS = {
    "stale": (Way(stale={0: True, 3: ("0.weight",)}), False),
    "parts of a bucket stale": (Way(stale={1: ("0.weight", "4.bias")}, cap=25), False),
    "paid out": (Way(), True),
    "blocks": (Way("block_topk(density=0.4, block=8)"), False),
    "low rank": (Way("powersgd(rank=1, start=2)"), False),
}


def test_norms_tell_sums_of_this_step_from_those_of_the_one_before():
    """And of the own gradient without what an earlier run has not sent."""
    for rank, found in enumerate(run_ranks(_norms, 2, NORMS)):
        for name, (rows, own, given, kinds, over) in found.items():
            for step, (local, averaged, stale) in enumerate(rows):
                assert local == pytest.approx((2 * own[step] ** 2).sum() * 2, rel=1e-5), (name, rank)
                assert averaged + stale == pytest.approx((given[step] ** 2).sum(), rel=1e-5), name
                assert stale == 0.0 or "stale" in name
                assert averaged == 0.0 or kinds[step] != set(ALL)
            assert over, "it is paid out once"
        assert (found["parts of a bucket stale"][0][2:, 1:] > 0).all()


# a backward pass


def _direct(rank, weighted, through):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(6, 1).double())
    state = state_of(weighted=weighted)
    model.register_comm_hook(state, gradient_hook)
    with state.backward() if through else nullcontext():
        model(_batch(rank, 0)).square().mean().backward()


def test_a_backward_pass_that_bypasses_the_weighting_is_an_error_on_every_rank():
    errors = run_ranks(_direct, 2, True, False, expect_errors=True)
    assert [(kind, "manual_backward" in text) for _, kind, text in errors] == [("RuntimeError", True)] * 2
    for weighted, through in ((True, True), (False, False)):
        run_ranks(_direct, 2, weighted, through)


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_backward_pass_inside_went_through_the_strategy(fails):
    state = state_of(weighted=True)
    with suppress(ZeroDivisionError), state.backward():
        state.begin_bucket(torch.ones(2), first=True)
        1 / (not fails)
    with pytest.raises(RuntimeError, match="backward"):
        state.begin_bucket(torch.ones(2), first=True)
    state.require_weighting(False)
    state.begin_bucket(torch.ones(2), first=True)


def test_every_optimizer_step_needs_a_backward_pass_since_the_one_before():
    check = BackwardCheck()
    check.begin_batch()
    check.count()
    check.begin_batch()  # the next one of an accumulation window
    check.step()
    check.step()  # another optimizer on the same gradients
    check.begin_batch()
    with pytest.raises(RuntimeError, match="backward"):
        check.step()


def test_a_step_that_was_left_out_is_over_with_the_first_bucket_of_the_next():
    state, sending = state_of(), []
    assert not state.take_fired()
    state.begin_bucket(torch.ones(2), first=True)
    sending.append(state.backwards.sending)
    state.skip_step()
    state.hold(lambda: None)
    sending.append(state.backwards.sending)
    state.begin_bucket(torch.ones(2), first=False)
    assert state.step_skipped
    with state.backward():
        sending.append(state.backwards.sending)
    assert sending == [True, False, False], "nobody can say whether a bucket was sent whose hook has failed"
    assert [state.take_fired(), state.take_fired()] == [True, False]
    for over in (lambda: state.begin_bucket(torch.ones(2), first=True), state.forget_squares):
        state.skip_step()
        over()
        assert not state.step_skipped
    state.active.flags.skip()
    assert state.step_skipped, "what an averager has left out counts too"


def test_the_end_of_a_run_waits_until_callbacks_are_released():
    """A thread of the process group may still hold one; else the interpreter aborts the process at its end."""
    state, ready = state_of(), threading.Event()
    holder = [lambda: None]
    state.hold(holder[0])
    thread = threading.Thread(target=lambda: (ready.wait(5), holder.clear()))
    thread.start()
    ready.set()
    state.settle()
    assert holder == []
    thread.join()
    kept = [lambda: None]
    state.hold(kept[0])
    state.settle(timeout=0.01)
    assert kept, "it waits no longer than that"


def test_a_checkpoint_of_stale_sums_waits_for_who_takes_it_once(caplog):
    state, held = state_of(), {"delayed": ["w"], "sums": {"w": torch.ones(2)}}
    state.load_stale_state(held)
    assert state.stale_state() is held, "it is saved again where no model has come"
    assert state.take_restored() is held
    assert state.take_restored() == {}, "its sums would be applied twice"
    loaded, way = [], SimpleNamespace()

    def lost():
        raise RuntimeError("rank 1 is gone")

    stale = SimpleNamespace(topology=way, state_dict=lost, load_state_dict=loaded.append)
    state.set_staleness(stale)
    assert state.stale_state() == {}, "a checkpoint is written all the same"
    assert "rank 1 is gone" in caplog.text
    state.load_stale_state(held)
    assert loaded == [held]
    assert state.topologies == [way], "groups to leave"


def test_the_model_can_be_copied_and_pickled_without_the_run():
    state = state_of()
    assert copy.deepcopy(state) is pickle.loads(pickle.dumps(state)) is None


def test_buckets_may_be_laid_out_anew_unless_a_users_hook_knows_them():
    state = state_of()
    for hook, given, knows in ((None, None, False), (print, None, False), (print, PowerSGDState(None), True)):
        state.use_hook(hook, given)
        assert state.averager.user_hook is hook
        reason = state.averager.unsupported_reason()
        assert (reason is not None and "powersgd" in reason) == knows


# times


def _timed(rank):
    found = []
    for compression in (None, "block_topk(density=0.4, block=8, warmup_steps=0)"):
        run = Run(rank, Way(compression), clock=Hand(tick=1.0))
        for step in range(6):
            run.backward(step)
        table = run.hook.observer.take()
        found.append(table[~np.isnan(table[:, 0])])
        run.close()
    return found


def test_every_bucket_is_timed():
    for plain, blocks in run_ranks(_timed, 2):
        for rows in (plain, blocks):
            assert rows[:, 0].tolist() == [4, 5, 6]
            assert rows.shape[1] == 10 + 5, "buckets of three layers, as laid out after the first step"
            ends = rows[:, 10:]
            assert (np.diff(rows[:, [4, 3]], axis=1) > 0).all(), "the first bucket is ready before the last one"
            assert (ends > rows[:, 4:5]).all()
        assert (blocks[:, 5] == 4).all(), "what waits for the last bucket is no communication of its own"


# buffers


class Buffered(nn.Module):
    """Adds a buffer that each rank sets to another value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x):
        return self.layer(x) + self.own


class Doubles:
    """A hook of the user's, that takes ten seconds of a clock."""

    def __init__(self, clock):
        self.clock, self.calls = clock, []

    def __call__(self, state, buffers):
        self.calls.append(sorted(buffers))
        self.clock.now += 10.0
        for buffer in buffers.values():
            buffer.mul_(2)


def _buffers(rank):
    dist.init_process_group("gloo")
    found = {}
    for where in (None, _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD):
        clock = Hand()
        model, timer, hook = DistributedDataParallel(Buffered().double()), StepTimer(clock), Doubles(clock)
        model.register_comm_hook(state_of(timer), gradient_hook)
        if where is not None:
            model._register_buffer_comm_hook(None, hook, where)
        time_buffers(model, timer)
        used = []
        for step in range(4):
            model.module.own.fill_(float(rank + 1))
            timer.begin_step(5, regular=True)
            clock.now += 1.0
            out = model(_batch(rank, step))
            used.append((float((out - model.module.layer(_batch(rank, step)))[0].detach()), float(model.module.own)))
            timer.begin_backward()
            out.square().mean().backward()
            timer.end_backward()
            timer.end_step()
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            if where is None:  # they broadcast, too: all ranks do this together
                one.module.own.fill_(float(rank + 5))
                one(_batch(rank, 0))
                used.append(float(one.module.own))
        table = timer.take()
        found[where and where.name] = used, len(hook.calls), table[~np.isnan(table[:, 0]), 2].tolist()
        del model
        gc.collect()
    return found


def test_buffers_are_made_equal_as_by_ddp_and_waiting_there_is_no_computing():
    """Else all workers of a model with buffers would look equally fast. A user's own hook stays where it is."""
    for rank, found in enumerate(run_ranks(_buffers, 2)):
        assert found[None] == ([(pytest.approx(1.0), 1.0)] * 4 + [5.0] * 2, 0, [1.0])
        own = float(rank + 1)
        assert found["PRE_FORWARD"] == ([(pytest.approx(2 * own), 2 * own)] * 4, 4, [1.0])
        assert found["POST_FORWARD"] == ([(pytest.approx(own), 2 * own)] * 4, 4, [1.0])
