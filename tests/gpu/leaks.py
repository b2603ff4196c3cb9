"""Steps of each mode and front end keep nothing on the GPU; two ranks share it, each as a machine of its own.

Each part is a pair of processes that train in one mode after another. It begins with a training that keeps a number
of each step, which must be found: so the check shows on the machine at hand that it can fail.
"""

import sys
from pathlib import Path

from tests.gpu.common import noted, ranks

FIRST, LAST, ROUND = 100, 300, 20
PARTS = {
    "lightning": (
        *("ddp", "plain", "even", "block top-k", "powersgd", "stale", "stale block top-k", "hierarchy"),
        *("noise scale", "adaptive", "skip", "elastic"),
    ),
    "fsdp": ("fsdp",),
    "fabric": ("fabric",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
}
SMALLEST = {"cuda": 512, "cpu": 64}
"""Bytes of the smallest allocation on a GPU; of a small tensor on a CPU."""


def benchmark():
    """The benchmark, whose trainings these are; for processes that do nothing else."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import leaks

    return leaks


def most(device):
    """Bytes that steps may keep: less than the smallest allocation with each sync round."""
    return SMALLEST[device] * (LAST - FIRST) // ROUND


def _part(rank, modes, device):
    """Bytes that the steps between two marks keep: of a number of each step, and then by mode."""
    import gc
    import os

    import torch

    leaks = benchmark()
    gc.freeze()  # what has been imported is not looked at each time
    os.environ.update(ACCELERATE_USE_CPU=str(device == "cpu").lower())
    leaks._modes.settle(rank)
    leaks._modes.quiet()
    numbers = []

    def added(mode, keeps):
        watch = leaks.Watch((FIRST, LAST), device)

        def after_step(number, model):
            if keeps:
                numbers.append(torch.zeros(SMALLEST[device] // 4, device=device))
            watch(number, model)

        leaks._modes.train(mode, LAST + 1, after_step, device=device)
        first, last = (counts["tensor_bytes"] for counts in watch.counts)
        return last - first

    found = {"a number of each step": added(modes[0], True)}
    numbers.clear()
    return {**found, **{mode: added(mode, False) for mode in modes}}


def leaks(figures, device):
    """Two modes on CPUs, whose tensors are in the memory of the host."""
    parts, device = PARTS if device.type == "cuda" else {"lightning": ("plain", "stale block top-k")}, device.type
    for part, modes in parts.items():
        with noted(figures, part):
            found = ranks(_part, 2, modes, device, timeout=240)
            for name in found[0]:
                kept = max(of_rank[name] for of_rank in found)
                if name in modes:
                    figures[f"{name}: bytes"] = kept
                    figures.must(kept < most(device), f"steps of {name} keep {kept} bytes")
                else:
                    figures[f"{part}: bytes of {name}"] = kept
                    holds = kept >= SMALLEST[device] * (LAST - FIRST) / 2
                    figures.must(holds, f"{part}: {name} is not found, {kept} bytes")
