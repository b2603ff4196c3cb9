"""Steps of a language model: are their parts the wall clock's, and what do they cost over DDP?"""

import numpy as np
import torch

from tests.gpu.common import GPT, Clock, median, noted, place, ranks
from tests.gpu.outcome import Figures
from tests.helpers import trainer_of

PARTS = ("data_wait", "forward", "backward", "optimizer", "last_sync")


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


def clock(figures, device):
    """By each lead of the host over the device."""
    real = device.type == "cuda"
    for lead in (0, 1, 3) if real else (0,):
        with noted(figures, f"lead {lead}"):
            (found,) = ranks(_clock, 1, device, lead, *((34, 8, 1024) if real else (10, 2, 16)))
            figures.add(found, f"lead {lead}")
            share = found["sum over wall"]
            figures.must(not real or abs(share - 1) <= 0.03, f"lead {lead}: the parts are {share:.3f} of the step")


def modes():
    from lightning_hetero import BlockTopK, GNSCallback

    blocks = BlockTopK(density=0.01, warmup_steps=2)
    return {
        "dense": ({}, list),
        "noise scale": ({}, lambda: [GNSCallback()]),
        "stale": ({"staleness": 1}, list),
        "block top-k": ({"compression": blocks}, list),
        "stale block top-k": ({"compression": blocks, "staleness": 1}, list),
        "PowerSGD": ({"compression": "powersgd"}, list),
    }


def _overhead(rank, count, figures, device, size, length, steps, kinds):
    """Each mode twice between trainings by torch's DDP, in one process; what is found is written down here."""
    if rank:
        figures = Figures(figures.folder / f"overhead{rank}.json")
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_hetero import HeteroDDPStrategy

    where, model, known = place(rank, count, device), GPT.on(device), {"ddp": ({}, list), **modes()}
    parameters = sum(p.numel() for p in model.parameters())

    def train(name):
        settings, callbacks = known[name]
        clock = Clock(device, steps // 3, steps - 1)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        strategy = DDPStrategy if name == "ddp" else HeteroDDPStrategy
        trainer = trainer_of(
            strategy(process_group_backend=backend(device), **settings),
            1,
            max_epochs=1,
            precision=precision(device),
            callbacks=[*callbacks(), clock],
            **where,
        )
        trainer.fit(model, model.batches(size, length, steps * count))
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        times = {"ms": 1e3 * clock.seconds, "host ms": 1e3 * median(clock.host or [0.0])}
        return {**times, "bytes per parameter": peak / parameters}

    train("ddp")
    before = train("ddp")
    figures.add(before, "ddp")
    for name in kinds:
        with noted(figures, name):
            ours, after = [train(name), train(name)], train("ddp")
            plain, before = {part: (before[part] + after[part]) / 2 for part in after}, after
            mean = {part: (ours[0][part] + ours[1][part]) / 2 for part in after}
            figures[f"{name}: times the step of ddp"] = share = mean["ms"] / plain["ms"]
            figures.add({f"{part} more": mean[part] - plain[part] for part in mean}, name)
            limit = {"dense": 1.01, "noise scale": 1.02}.get(name, 9.0)
            figures.must(device.type == "cpu" or share <= limit, f"{name} takes {share:.3f} of DDP's step")
    return figures.state()


def overhead(figures, device):
    """What a strategy adds to a step, without what its exchange saves or costs on a link.

    One worker has nobody to send compressed or stale gradients to, so these modes need two ranks over NCCL.
    """
    real = device.type == "cuda"
    count = figures.known.get("machine", {}).get("ranks over NCCL", 1) if real else 2
    figures["ranks"] = count
    kinds = (list(modes()) if count > 1 else ["dense"]) if real else ["dense", "stale block top-k"]
    size = (16, 1024, 18) if real else (2, 16, 6)  # batch, tokens of a sample, steps of a training
    figures.take(ranks(_overhead, count, count, figures, device, *size, kinds, timeout=200)[0])
