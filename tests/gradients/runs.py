"""A loop of one's own on ranks, whose gradients are averaged in one of the ways of a table, and a record of its steps.

What is asked of every way of averaging is in `test_averagers.py`. The parts are put together here and nowhere else.
"""

import copy
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.gradients.health import Health
from lightning_hetero.comm.staleness.block_topk import BlockTopKStaleAverager
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.compression.settings import parse_compression

TINY = 1e-5
"""MB of a bucket: one for each parameter after the first step."""
SHARES = {1: (1.0,), 2: (0.75, 0.25), 3: (0.5, 0.2, 0.3)}
"""Each rank's share of a batch, by the number of ranks."""


class Crossed(nn.Module):
    """Layers are not listed in the order in which they are used, so that DDP's buckets change after the first step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        for name, sizes in (("2", (9, 8)), ("4", (8, 1)), ("0", (6, 9))):
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, x):
        for name in ("0", "2"):
            x = self.get_submodule(name)(x).tanh()
        return self.get_submodule("4")(x)


ALL = tuple(name for name, _ in Crossed().named_parameters())
INPUT = ("0.weight", "0.bias")


def flat(tensors, like):
    """One array of all values, zeros where there is nothing."""
    parts = [
        torch.zeros(p.numel()) if t is None else t.to_dense().flatten() for t, p in zip(tensors, like, strict=True)
    ]
    return np.concatenate([part.detach().double().numpy() for part in parts])


@dataclass(frozen=True)
class Way:
    """A way of averaging.

    Args:
        compression: as a user gives it.
        stale: from which step on which parameters are stale, ``True`` for all; ``None`` without staleness.
        density: from which step on messages have another density.
        sparse: whether the optimizer takes blocks.
        clusters: of a hierarchy.
        cap: MB of a bucket.
        scale: factor of a loss scaler.
        close: tolerance of sums.
        priority: whether synchronous sums cross the link before stale ones.
        ranks: number of ranks.
    """

    compression: Any = None
    stale: Any = None
    density: Any = None
    sparse: Any = False
    clusters: Any = None
    cap: float = TINY
    scale: float | None = None
    close: float = 2e-4
    priority: bool = False
    ranks: int = 2

    @property
    def dtype(self):
        return torch.float32 if self.compression else torch.float64


class Run:
    """Training on this rank.

    Args:
        rank: of this process.
        way: how gradients are averaged.
        model: what is trained, :class:`Crossed` by default.
        saved: what another run has saved.
        mode: what happens to gradients that are not finite.
    """

    def __init__(self, rank, way, *, model=None, saved=None, mode="ignore"):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        ranks = dist.get_world_size()
        self.rank, self.ranks, self.way, self.share = rank, ranks, way, SHARES[ranks][rank]
        self.model = (Crossed() if model is None else model).to(way.dtype)
        if saved:
            self.model.load_state_dict(saved["model"])
        self.parameters, clock = dict(self.model.named_parameters()), HostClock()
        self.control = ControlPlane(rank, ranks)
        topology = Topology(rank, way.clusters or tuple((r,) for r in range(ranks)))
        self.hook = HookState(StepTimer(clock), ranks, topology=topology)
        self.late = self.compression = None
        if way.compression:
            settings = parse_compression(way.compression)
            self.compression = GradientCompression(settings, self.control, self.hook, way.sparse)
            self.compression.load_state_dict(saved["compression"] if saved else {})
            self.compression.attach(self.model, grad_scale=way.scale and (lambda: way.scale))
        if way.stale is not None:
            self._delay(clock, topology, saved["staleness"] if saved else None)
        self.health = Health(mode, self.control, self.hook, clock)
        self.health.begin()
        self.health.attach(self.model)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=way.cap)
        self.ddp.register_comm_hook(self.hook, gradient_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])
        if self.compression:
            self.compression.bind_optimizers([self.optimizer])
        self.seen = {name: [] for name in ("given", "own", "owed", "left", "kind", "exact", "skipped", "weights")}

    def _delay(self, clock, topology, restored):
        own = {"clock": clock, "restored": restored, "hold": self.hook.hold}
        if self.ranks > 1:
            own["topology"] = topology.with_own_groups()
        blocks = self.compression.blocks if self.compression else None
        if blocks is None:
            way = {"world_size": self.ranks, "synchronous": topology, "priority": self.way.priority}
            self.late = DenseStaleAverager(1, self.parameters, **way, **own)
        else:
            self.late = BlockTopKStaleAverager(1, blocks, self.parameters, **own)
        self.hook.set_staleness(self.late)

    def make_stale(self, names):
        if names is True:
            self.late.make_all_stale()
        elif not names:
            self.late.make_all_synchronous()
        else:
            self.late.make_stale(names)

    def loss(self, model, step, bad):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * self.rank + step)).to(self.way.dtype)
        return model(x).square().mean() * (float("nan") if bad else 1.0) * (self.way.scale or 1.0)

    def backward(self, step, *, bad=False):
        """Follow the schedules, and average the gradient of this rank's share."""
        if step in (self.way.stale or {}):
            self.make_stale(self.way.stale[step])
        if step in (self.way.density or {}):
            self.compression.set_density(self.way.density[step])
        timer = self.hook.observer
        timer.begin_step(5, regular=True)
        self.optimizer.zero_grad()
        loss = self.loss(self.ddp, step, bad)
        self.health.see(loss, (0, step))
        timer.begin_backward()
        with self.hook.backward():
            (loss * self.ranks * self.share).backward()
        timer.end_backward()
        if self.compression:
            self.compression.after_backward()
        self.health.after_backward()
        timer.end_step()
        return flat([p.grad for p in self.parameters.values()], self.parameters.values()) / (self.way.scale or 1.0)

    def step(self, number, *, bad=False, look=False):
        """One step; ``look`` also records what a checkpoint would hold, for which messages are waited for."""
        alone = copy.deepcopy(self.model)
        alone.zero_grad()
        self.loss(alone, number, bad=False).backward()
        own = flat([p.grad for p in alone.parameters()], self.parameters.values()) / (self.way.scale or 1.0)
        seen = {"own": own * self.share, "given": self.backward(number, bad=bad)}
        flags = self.hook.active.flags if self.way.compression else self.hook.averager.flags
        seen |= {"exact": flags.exact, "skipped": bool(self.hook.step_skipped)}
        seen["kind"] = self.late and (self.late.step_kind if self.late.step_kind is None else set(self.late.step_kind))
        if look:
            seen |= {"left": self.left(), "owed": self.owed()}
        for p in self.parameters.values() if self.way.scale else ():
            p.grad.mul_(1.0 / self.way.scale)
        self.optimizer.step()
        seen["weights"] = flat(self.model.parameters(), self.parameters.values())
        for name, value in seen.items():
            self.seen[name].append(value)

    def left(self):
        """What this rank has not sent yet."""
        averager = self.compression and self.compression.averager
        residuals = averager.residuals() if averager else {}
        return flat([residuals.get(name) for name in self.parameters], self.parameters.values())

    def owed(self):
        """Sums that are on their way."""
        sums = self.hook.stale_state().get("sums", {})
        return flat([sums.get(name) for name in self.parameters], self.parameters.values())

    def save(self):
        """What a checkpoint holds, as it comes out of a file."""
        state = [self.compression.state_dict() if self.compression else {}]
        dist.broadcast_object_list(state)
        saved = {"compression": state[0], "staleness": self.hook.stale_state()}
        saved |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(saved, file := io.BytesIO())
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    def result(self):
        self.close()
        return {name: np.array(value) if name not in ("kind",) else value for name, value in self.seen.items() if value}

    def close(self):
        """Leave the groups, so that the next run of this process begins with its own."""
        self.health.close()
        self.hook.settle()
        for way in self.hook.topologies:
            way.close()
        self.control.close()
