"""The hook in DDP against DDP itself: averages, hooks of the user's, norms, marks, buffers, backward passes."""

import copy
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.gradients.buffer_sync import time_buffers
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
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
    "halves, a bucket for each parameter": (wide, bf16_compress_hook, TINY, 1),
    "sparse rows": (Bag, None, 25, 1),
    "norms in parts of sparse rows": (Bag, None, TINY, 3),
}


@pytest.fixture(scope="module")
def averaged():
    return run_ranks(_averaged, 3, AVERAGED)


@pytest.mark.parametrize("name", AVERAGED)
def test_average_is_that_of_ddp(name, averaged):
    """To the last bit, also with three ranks, by whose number a division rounds otherwise than a multiplication."""
    ours = averaged[0][name][0]
    for result in averaged:
        np.testing.assert_array_equal(result[name][0], ours)
        if AVERAGED[name][1] is not None:
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
    size = 30 * (8 + 4 * 8) + 5 * 8 if make is Bag else 8 * averaged[0][name][0].shape[1]
    assert seen[0, -1, 4] == 3 * size, "of a sparse gradient, rows with their numbers"


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


def _direct(rank):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(6, 1).double())
    state = state_of(weighted=True)
    model.register_comm_hook(state, gradient_hook)
    with state.backward():
        model(_batch(rank, 0)).square().mean().backward()
    with suppress(ZeroDivisionError), state.backward():
        raise ZeroDivisionError
    model(_batch(rank, 0)).square().mean().backward()


def test_a_backward_pass_that_bypasses_the_weighting_is_an_error_on_every_rank():
    errors = run_ranks(_direct, 2, expect_errors=True)
    assert [(kind, "manual_backward" in text) for _, kind, text in errors] == [("RuntimeError", True)] * 2


def test_the_model_can_be_copied_and_pickled_without_the_run():
    state = state_of()
    assert copy.deepcopy(state) is pickle.loads(pickle.dumps(state)) is None


# buffers


class Buffered(nn.Module):
    """Adds a buffer that each rank sets to another value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x):
        return self.layer(x) + self.own


def _buffers(rank):
    dist.init_process_group("gloo")
    model, timer = DistributedDataParallel(Buffered().double()), StepTimer(clock := Hand())
    model.register_comm_hook(state_of(timer), gradient_hook)
    time_buffers(model, timer)
    plain, used = model._default_broadcast_coalesced, []

    def slow():
        clock.now += 10.0
        plain()

    model._default_broadcast_coalesced = slow
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
    del model._default_broadcast_coalesced
    copy.deepcopy(model), pickle.dumps(model)
    table = timer.take()
    return used, table[~np.isnan(table[:, 0]), 2].tolist()


def test_buffers_are_made_equal_as_by_ddp_and_waiting_there_is_no_computing():
    """Else all workers of a model with buffers would look equally fast."""
    assert run_ranks(_buffers, 2) == [([(pytest.approx(1.0), 1.0)] * 4, [1.0])] * 2
