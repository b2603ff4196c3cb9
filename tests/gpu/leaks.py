"""Steps of each mode and front end keep nothing on the GPU; two ranks share it, each as a machine of its own.

Each part is a pair of processes that train in one mode after another. It begins with a training that keeps a number
of each step, which must be found: so the check shows on the machine at hand that it can fail.
"""

import sys
from pathlib import Path

from tests.gpu.common import ranks
from tests.gpu.outcome import require

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


def measure(parts, device):
    """Figures of all parts, and what is wrong with them."""
    from tests.helpers import RankError

    figures, wrong = {}, []
    for part, modes in parts.items():
        try:
            found = ranks(_part, 2, modes, device, timeout=240)
        except (RankError, TimeoutError) as error:  # the other parts may have something to say
            print(error)
            why = "rank " + ": ".join(map(str, error.errors[0])) if isinstance(error, RankError) else str(error)
            wrong.append(f"{part}: {why}".partition("\n")[0])
            continue
        for name in found[0]:
            kept = max(of_rank[name] for of_rank in found)
            counts = name not in modes
            figures[f"{part}: bytes of {name}" if counts else f"{name}: bytes"] = kept
            if counts and kept < SMALLEST[device] * (LAST - FIRST) / 2:
                wrong.append(f"{part}: {name} is not found, {kept} bytes")
            elif not counts and kept >= most(device):
                wrong.append(f"steps of {name} keep {kept} bytes")
    return figures, wrong


def gpu():
    figures, wrong = measure(PARTS, "cuda")
    require(not wrong, "; ".join(wrong), figures)
    return figures


def stand_in():
    """Tensors in the memory of the host, of two modes; ``tests/test_leaks.py`` has others."""
    figures, wrong = measure({"lightning": ("plain", "stale block top-k")}, "cpu")
    require(not wrong, "; ".join(wrong), figures)
    return figures
