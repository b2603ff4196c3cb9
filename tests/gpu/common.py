"""What the checks of the GPU paths share: work of known time on a device, ranks, and pytest in a process of its own."""

import time
from dataclasses import dataclass
from functools import cache

import torch

from tests.gpu.outcome import require

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CALIBRATION = 20_000_000


def ranks(function, world_size, *args, timeout=90.0):
    """Results of ``function(rank, *args)`` in processes of their own, which may use the GPU."""
    from tests.helpers import run_ranks

    return run_ranks(function, world_size, *args, timeout=timeout, start="spawn")


@cache
def cycles_per_second():
    """What ``torch.cuda._sleep`` counts in a second, on a GPU that has come up to speed; the median of some."""
    for _ in range(20):  # the clock of an idle GPU is low
        torch.cuda._sleep(CALIBRATION)
    found = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(CALIBRATION)
        end.record()
        torch.cuda.synchronize()
        found.append(CALIBRATION / (begin.elapsed_time(end) * 1e-3))
    return sorted(found)[3]


def busy(device, seconds):
    """Keep a device busy without arithmetic: a GPU behind the host's back, a CPU by sleeping."""
    if seconds <= 0:
        return
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * cycles_per_second()))
    else:
        time.sleep(seconds)


class Busy(torch.autograd.Function):
    """The identity, which takes the given seconds forwards and backwards."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        busy(x.device, forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        busy(gradient.device, ctx.seconds)
        return gradient, None, None


@dataclass(frozen=True)
class Speed:
    """Seconds of a worker: ``b`` samples take ``by_sample * b + fixed`` forwards, and twice that backwards."""

    by_sample: float
    fixed: float = 0.002

    def step(self, samples):
        """Of a whole step but for what surrounds it."""
        return 3 * (self.by_sample * samples + self.fixed)

    def __call__(self, x):
        seconds = self.by_sample * len(x) + self.fixed
        return Busy.apply(x, seconds, 2 * seconds)


def pytest_passes(arguments, env=None, timeout=600):
    """Run pytest on files of the tree in a process of its own; its last line."""
    import os
    import subprocess
    import sys

    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=timeout, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    figures = {"tests": lines[-1].strip("= ") if lines else "nothing was said"}
    if done.returncode != 0:
        print(done.stdout[-8000:], done.stderr[-4000:])
    require(done.returncode == 0, f"pytest {' '.join(arguments)}: {figures['tests']}", figures)
    return figures
