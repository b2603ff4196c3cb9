"""Buffers are broadcast as DDP does it, and a worker that waits there for a slow one does not seem slow itself."""

import contextlib
import copy
import pickle
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils.data import DataLoader

from lightning_hetero.comm.gradients.buffer_sync import time_buffers
from tests.helpers import Points, run_ranks

SLOW, STEPS = 0.004, 60  # seconds that rank 1 takes to load a sample


class Loaded(Points):
    def __init__(self, rank, n):
        super().__init__(n)
        self.rank = rank

    def __getitem__(self, i):
        time.sleep(SLOW * self.rank)
        return super().__getitem__(i)


class Buffered(nn.Module):
    """Adds a buffer that each rank sets to another value, and rank 0's counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1, dtype=torch.float64)
        self.register_buffer("own", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + self.own


def _fabric(rank, count):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(replan=5))
    fabric.launch()
    net = Buffered()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    sizes, seen, rows = [], [], []
    for x, y, _ in fabric.setup_dataloaders(DataLoader(Loaded(rank, 8 * 2 * count), 8)):
        net.own.fill_(float(rank + len(sizes)))
        out = model(x)
        seen.append(float(net.own))
        sizes.append(len(x))
        if len(sizes) == 5:
            rows = [row.copy() for row in fabric.strategy.engine.observer.rows]
        fabric.backward(nn.functional.mse_loss(out, y))
        optimizer.step()
        optimizer.zero_grad()
    copies = [copy.deepcopy(model._forward_module), pickle.loads(pickle.dumps(model._forward_module))]
    for one in copies:  # they broadcast, too: all ranks do this together
        one.module.own.fill_(float(rank + 7))
        one(x)
        seen.append(float(one.module.own))
    return sizes, seen, np.stack(rows)


@pytest.mark.alone
def test_a_worker_that_waits_for_a_slow_loader_at_its_buffers_gets_the_larger_batch():
    (sizes, seen, rows), (_, others, _) = run_ranks(_fabric, 2, STEPS)
    assert seen == others == [*range(len(sizes)), 7.0, 7.0]
    forward, backward = rows[:, 2], rows[:, 3]
    assert np.median(forward + backward) < 8 * SLOW / 4, "waiting for the other's loader counts as computing"
    assert sizes[0] == 8
    assert sizes[-5] > 11


class Timer:
    """Counts the spans that are left out."""

    def __init__(self):
        self.spans = 0

    def excluded(self):
        timer = self

        class Span(contextlib.ContextDecorator):
            def __enter__(self):
                timer.spans += 1

            def __exit__(self, *error):
                return False

        return Span()


def _doubled(state, buffers):
    state.append(sorted(buffers))
    for buffer in buffers.values():
        buffer.mul_(2)


def _own_hook(rank, location):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model, timer, calls = DistributedDataParallel(Buffered()), Timer(), []
    if location is not None:
        model._register_buffer_comm_hook(calls, _doubled, location)
    time_buffers(model, timer)
    model.module.own.fill_(float(rank + 1))
    x = torch.ones(2, 5, dtype=torch.float64)
    first = float((model(x) - model.module.layer(x))[0].detach())
    return first, float(model.module.own), calls, timer.spans


@pytest.mark.parametrize("location", [None, _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD])
def test_a_users_own_hook_is_kept_where_it_is(location):
    for rank, (used, after, calls, spans) in enumerate(run_ranks(_own_hook, 2, location)):
        assert spans == 1
        if location is None:
            assert (used, after, calls) == (pytest.approx(1.0), 1.0, [])
        else:
            later = location is _BufferCommHookLocation.POST_FORWARD
            assert calls == [["own"]]
            assert after == 2.0 * (rank + 1)
            assert used == pytest.approx((rank + 1) * (1 if later else 2))
