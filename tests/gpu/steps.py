"""Steps of a language model: are their parts the wall clock's, what do they cost over DDP, and when do rounds come?"""

import json
import tempfile
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu.common import GPT, Busy, Clock, median, noted, place, ranks
from tests.gpu.outcome import Figures
from tests.helpers import Points, trainer_of

PARTS = ("data_wait", "forward", "backward", "optimizer", "last_sync")
NAP = 1e-4
LAYERS, EACH = 6, 24


def backend(device):
    return "nccl" if device.type == "cuda" else "gloo"


def precision(device):
    return "bf16-mixed" if device.type == "cuda" else "32-true"


def _clock(rank, device, lead, steps, size, length):
    """Parts of a step in all, over its wall clock."""
    from lightning_hetero import HeteroDDPStrategy

    where = place(rank, 1, device)
    strategy = HeteroDDPStrategy(replan=8, process_group_backend=backend(device), report=False)
    clock, model = Clock(device, steps // 3, steps - 1, lead), GPT.on(device)
    trainer = trainer_of(strategy, 1, max_epochs=1, precision=precision(device), callbacks=[clock], **where)
    trainer.fit(model, model.batches(size, length, steps))
    found = strategy.observations()
    parts = {name: 1e3 * float(np.nanmedian(getattr(found, name))) for name in PARTS}
    wall = 1e3 * median(clock.host)
    return {**parts, "wall": wall, "sum over wall": sum(parts.values()) / wall}


class Nap(torch.autograd.Function):
    """The identity, for which a host takes a while, and twice as long backwards."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = 2 * seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def _slow_beside(rank, device, compression, steps):
    """Backward passes that the ranks report, where rank 1 takes twice as long as rank 0."""
    from lightning_hetero import HeteroDDPStrategy

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(5, 256), *(nn.Linear(256, 256) for _ in range(LAYERS))])

        def training_step(self, batch, batch_idx):
            x = batch[0]
            for layer in self.layers:
                x = Nap.apply(torch.tanh(layer(x)), NAP * (1 + rank) * len(x))
            return x.square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    strategy = HeteroDDPStrategy(
        replan=8,
        compression=compression,
        bucket_cap_mb=0.2,
        process_group_backend="gloo",
        local_batch_sizes=[EACH, EACH],
        report=False,
    )
    trainer = trainer_of(strategy, 1, max_epochs=1, **place(rank, 2, device))
    trainer.fit(Module(), DataLoader(Points(2 * EACH * steps, dtype=torch.float32), EACH))
    return np.nanmedian(strategy.observations().backward, axis=0).tolist()


def clock(figures, device):
    """By each lead of the host over the device; and where a slow rank is waited for inside the backward pass."""
    from lightning_hetero.core.compression.settings import LowRank

    real = device.type == "cuda"
    for lead in (0, 1, 3) if real else (0,):
        with noted(figures, f"lead {lead}"):
            (found,) = ranks(_clock, 1, device, lead, *((34, 8, 1024) if real else (10, 2, 16)))
            figures.add(found, f"lead {lead}")
            share = found["sum over wall"]
            figures.must(not real or abs(share - 1) <= 0.03, f"lead {lead}: the parts are {share:.3f} of the step")
    own = 2 * NAP * EACH * (LAYERS + 1)
    for name, compression in {"dense": None, "PowerSGD": LowRank(rank=2, start=2)}.items():
        with noted(figures, f"a slow rank, {name}"):
            fast, slow = ranks(_slow_beside, 2, device, compression, 24 if real else 10)[0]
            figures.add({"fast ms": 1e3 * fast, "slow ms": 1e3 * slow, "fast, true ms": 1e3 * own}, f"{name}: P")
            holds = fast < 1.3 * own + 0.005
            figures.must(not real or holds, f"{name}: P of the fast rank is {1e3 * fast:.0f} ms for {1e3 * own:.0f}")


def modes():
    from lightning_hetero import BlockTopK, GNSCallback

    blocks = BlockTopK(density=0.01, warmup_steps=2)
    return {
        "dense": ({}, list),
        "noise scale": ({}, lambda: [GNSCallback()]),
        "noise scale, each step": ({}, lambda: [GNSCallback(every_n_steps=1)]),
        "fp16": ({"compression": "fp16"}, list),
        "stale": ({"staleness": 1}, list),
        "block top-k": ({"compression": blocks}, list),
        "stale block top-k": ({"compression": blocks, "staleness": 1}, list),
        "PowerSGD": ({"compression": "powersgd"}, list),
    }


class Counted(L.Callback):
    """Counts launches and synchronisations of some steps by torch's profiler; on a CPU, operations."""

    def __init__(self, first, last):
        self.first, self.last, self.steps, self.found = first, last, 0, {}
        self._profile = torch.profiler.profile()

    def on_train_batch_end(self, *_):
        self.steps += 1
        if self.steps == self.first:
            self._profile.start()
        if self.steps == self.last:
            self._profile.stop()
            counts = {event.key: event.count for event in self._profile.key_averages()}
            launches = {"launches": ("LaunchKernel", "MemcpyAsync", "MemsetAsync"), "waits": ("Synchronize",)}
            for name, parts in (launches if torch.cuda.is_available() else {"operations": ("aten::",)}).items():
                found = sum(count for key, count in counts.items() if any(part in key for part in parts))
                self.found[name] = found / (self.last - self.first)


def _overhead(rank, count, figures, device, bound, kinds):
    """Each mode twice between trainings by torch's DDP, in one process; what is found is written down here."""
    if rank:
        figures = Figures(figures.folder / f"overhead{rank}.json")
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_hetero import HeteroDDPStrategy

    where, model, known = place(rank, count, device), GPT.on(device), {"ddp": ({}, list), **modes()}
    size, length, steps = BOUNDS[bound]
    parameters = sum(p.numel() for p in model.parameters())

    def train(name, *, counts=False):
        settings, callbacks = known[name]
        number = 8 if counts else steps
        clock, counted = Clock(device, number // 3, number - 1), Counted(4, 7)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        strategy = DDPStrategy if name == "ddp" else HeteroDDPStrategy
        trainer = trainer_of(
            strategy(process_group_backend=backend(device), **settings),
            1,
            max_epochs=1,
            precision=precision(device),
            callbacks=[*callbacks(), counted if counts else clock],
            **where,
        )
        trainer.fit(model, model.batches(size, length, number * count))
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        times = {"ms": 1e3 * clock.seconds, "host ms": 1e3 * median(clock.host or [0.0])}
        return counted.found if counts else {**times, "bytes per parameter": peak / parameters}

    train("ddp")
    base, before = train("ddp", counts=True), train("ddp")
    figures.add({**base, **before}, f"{bound}, ddp")
    for name in kinds:
        with noted(figures, f"{bound}, {name}"):
            ours, after, counts = [train(name), train(name)], train("ddp"), train(name, counts=True)
            plain, before = {part: (before[part] + after[part]) / 2 for part in after}, after
            mean = {part: (ours[0][part] + ours[1][part]) / 2 for part in after}
            figures[f"{bound}, {name}: times the step of ddp"] = share = mean["ms"] / plain["ms"]
            more = {part: mean[part] - plain[part] for part in mean} | {p: counts[p] - base[p] for p in base}
            figures.add({f"{part} more": value for part, value in more.items()}, f"{bound}, {name}")
            limit = {"dense": 1.01, "noise scale": 1.02}.get(name, 9.0)
            figures.must(bound != "GPU-bound" or share <= limit, f"{bound}, {name} takes {share:.3f} of DDP's step")
    return figures.state()


BOUNDS = {"GPU-bound": (16, 1024, 18), "host-bound": (1, 64, 36), "small": (2, 16, 6)}
"""Batch, tokens of a sample, and steps of a training; the last for CPUs."""


def overhead(figures, device):
    """What a strategy adds to a step, without what its exchange saves or costs on a link.

    One worker has nobody to send compressed or stale gradients to, so these modes need two ranks over NCCL.
    """
    real, few = device.type == "cuda", ("dense", "stale block top-k", "noise scale, each step", "PowerSGD")
    count = figures.known.get("machine", {}).get("ranks over NCCL", 1) if real else 2
    figures["ranks"] = count
    bounds = {"GPU-bound": modes(), "host-bound": few} if real else {"small": few[:2]}
    for bound, kinds in bounds.items():
        with noted(figures, bound):
            kinds = kinds if count > 1 else ("dense",)
            figures.take(ranks(_overhead, count, count, figures, device, bound, kinds, timeout=150)[0])


def _rounds(rank, device, lead, steps, seconds, folder):
    """Step numbers of the sync rounds of a training by the default schedule."""
    from lightning_hetero import HeteroDDPStrategy

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def training_step(self, batch, batch_idx):
            return Busy.apply(self.layer(batch[0]), device, seconds / 3).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    clock = Clock(device, steps // 4, steps - 1, lead)
    strategy = HeteroDDPStrategy(process_group_backend="gloo", local_batch_sizes=[4, 4], report=folder)
    trainer = trainer_of(strategy, 1, max_epochs=1, callbacks=[clock], **place(rank, 2, device))
    trainer.fit(Module(), DataLoader(Points(8 * steps, dtype=torch.float32), 4))
    lines = [json.loads(line) for path in Path(folder).rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if line.get("kind") == "round"], 1e3 * clock.seconds


def rounds(figures, device):
    real, found = device.type == "cuda", {}
    steps, seconds = (150, 0.015) if real else (30, 0.003)
    for lead in (0, 2):
        with tempfile.TemporaryDirectory() as folder:
            (found[lead], step), _ = ranks(_rounds, 2, device, lead, steps, seconds, folder)
        gaps = np.diff([0, *found[lead]]).tolist()
        figures.add({"rounds": found[lead], "longest gap": max(gaps, default=0), "ms of a step": step}, f"lead {lead}")
        figures.must(found[lead], f"lead {lead}: no round was recorded")
    if real:
        longest = [figures[f"lead {lead}: longest gap"] for lead in (0, 2)]
        figures.must(longest[1] <= 2 * longest[0], f"rounds are {longest[1]} steps apart if the host is ahead")
