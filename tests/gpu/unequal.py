"""Workers of exactly known speeds on one GPU: the split is the analytic optimum, and steps take what was predicted.

Each worker is a process whose forward and backward pass keep the GPU busy for a time that follows from its samples,
without arithmetic. Where the GPU lets two such processes hold each other up, the hosts sleep in their place.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.gpu import common
from tests.gpu.common import CPU, GPU, Speed, busy, ranks
from tests.gpu.outcome import require

EACH = 24
STEPS = 40
BASE = 4e-4
CASES = {"1:2": (1, 2), "1:2:4": (1, 2, 4), "1:2 and a CPU of 4": (1, 2, 4)}


def _alone(rank, begin):
    """Seconds of 20 naps of 20 ms, of all processes at once."""
    common.cycles_per_second()
    time.sleep(max(0.0, begin - time.time()))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        busy(GPU, 0.02)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 0.4


def _fit(rank, times, devices, hosts_sleep, total):
    import lightning as L

    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import Points, trainer_of

    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(rank))
    if hosts_sleep:
        common.busy = lambda device, seconds: time.sleep(max(0.0, seconds))
    elif devices[rank] == "cuda":
        common.cycles_per_second()
    speed = Speed(BASE * times[rank])

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(5, 1)

        def training_step(self, batch, batch_idx):
            return speed(self.net(batch[0])).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    strategy = HeteroDDPStrategy(replan=8, process_group_backend="gloo")
    kind = "gpu" if devices[rank] == "cuda" else "cpu"
    trainer = trainer_of(strategy, 1, num_nodes=len(times), accelerator=kind, max_epochs=1)
    trainer.fit(Module(), DataLoader(Points(total * STEPS, dtype=torch.float32), EACH))
    plan, seen = strategy.plan_history[-1].plan, strategy.observations()
    return list(plan.local_batch_sizes), plan.step_time, seen.step_time.tolist(), len(strategy.plan_history)


def optimum(times, total):
    """Samples of each worker for equal times, ``k_i b_i`` alike: the fixed part is the same for all."""
    rates = [1 / t for t in times]
    return [total * rate / sum(rates) for rate in rates]


def measure(cases, hosts_sleep):
    """Splits and step times of all cases."""
    import numpy as np

    figures, wrong = {}, []
    for name, devices in cases.items():
        times = CASES[name]
        total = EACH * len(times)
        (sizes, predicted, steps, plans), *_ = ranks(_fit, len(times), times, devices, hosts_sleep, total, timeout=60)
        best, step = optimum(times, total), float(np.nanmedian(steps))
        figures |= {f"{name}: split": sizes, f"{name}: best": [round(b, 1) for b in best], f"{name}: plans": plans}
        figures[f"{name}: step over predicted"] = step / predicted if predicted else float("nan")
        off = max(abs(size - b) for size, b in zip(sizes, best, strict=True))
        figures[f"{name}: samples off"] = off
        wrong += [f"{name}: {off:.1f} samples off"] if off > 1 else []
        if not predicted or abs(step / predicted - 1) > 0.05:
            wrong.append(f"{name}: steps of {1e3 * step:.1f} ms, predicted {1e3 * (predicted or 0):.1f}")
    return figures, wrong


def gpu():
    together = max(ranks(_alone, 2, time.time() + 25))
    hosts_sleep = together > 1.05
    cases = {"1:2": ("cuda",) * 2, "1:2:4": ("cuda",) * 3, "1:2 and a CPU of 4": ("cuda", "cuda", "cpu")}
    figures, wrong = measure(cases, hosts_sleep)
    figures = {"two processes at once take": together, "who sleeps": "hosts" if hosts_sleep else "the GPU", **figures}
    require(not wrong, "; ".join(wrong), figures)
    return figures


def stand_in():
    """Two CPUs whose hosts sleep: on a busy machine times say little, so that only the direction has to be right."""
    figures, _ = measure({"1:2": (CPU.type,) * 2}, hosts_sleep=True)
    fast, slow = figures["1:2: split"]
    require(fast > slow, "the faster worker has not got more samples", figures)
    return figures
