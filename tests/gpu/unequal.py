"""Unequal workers on real devices: the split that is learned, against the best of those that are tried in the same run.

A GPU beside a CPU, where a sample is more work on the GPU, so that the CPU has a part worth learning. (Two processes on
one GPU run one after the other, whatever their shares: their times add up, and no split says anything.)
"""

import os
import time
from dataclasses import dataclass

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.common import CPU, Busy, Clock, median, place, ranks, synchronize
from tests.helpers import trainer_of

NAPS = (2e-4, 4e-4)
"""Seconds of a sample, in which two hosts sleep where there is no GPU."""


@dataclass(frozen=True)
class Worker:
    """A worker and its speed.

    Args:
        device: where it trains.
        rounds: how often a sample passes the network.
        nap: seconds of the host for a sample, twice as many backwards.
        threads: of a CPU.
    """

    device: torch.device
    rounds: int = 1
    nap: float = 0.0
    threads: int = 1


class Net(L.LightningModule):
    """Convolutions with few parameters and much work."""

    def __init__(self, worker, width, depth):
        super().__init__()
        torch.manual_seed(0)
        self.worker = worker
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
        self.body = nn.Sequential(*(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        x = functional.relu(self.first(batch[0]))
        for _ in range(self.worker.rounds):
            for layer in self.body:
                x = functional.relu(layer(x))
        loss = functional.cross_entropy(self.last(x.mean((2, 3))), batch[1])
        return Busy.apply(loss, CPU, self.worker.nap * len(batch[0])) if self.worker.nap else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Size:
    """Size of a case: of the network, of images, of a batch; steps for learning a split, and for timing one."""

    width: int = 128
    depth: int = 8
    image: int = 32
    each: int = 24
    learn: int = 48
    steps: int = 12
    tried: tuple[float, ...] = (-0.25, -0.12, -0.04, 0.04, 0.12, 0.25)
    seconds: float = 1.0


def images(size, count):
    """So many images and their classes, all of them one image in memory."""
    return torch.randn(3, size.image, size.image).expand(count, -1, -1, -1), torch.arange(count) % 10


def _speeds(rank, workers, size):
    """Seconds of a sample, for this worker alone."""
    worker = workers[rank]
    torch.set_num_threads(worker.threads)
    net = Net(worker, size.width, size.depth).to(worker.device)
    many = size.each // 2 if worker.device.type == "cuda" else min(8, size.each)
    batch = [part.to(worker.device) for part in images(size, many)]
    for seconds in (size.seconds / 2, size.seconds):
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            net.training_step(batch, 0).backward()
            synchronize(worker.device)
            count += 1
    return (time.perf_counter() - begin) / count / many


def _trainings(rank, workers, size):
    """The split that is learned, and median seconds of a step by fixed splits and by DDP's."""
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_hetero import HeteroDDPStrategy

    worker, total = workers[rank], 2 * size.each
    where = place(rank, 2, worker.device)
    torch.set_num_threads(worker.threads)

    def train(strategy, steps):
        clock = Clock(worker.device, steps // 3, steps - 1, lead=0)
        trainer = trainer_of(strategy, 1, max_epochs=1, callbacks=[clock], **where)
        loader = DataLoader(TensorDataset(*images(size, total * steps)), size.each)
        trainer.fit(Net(worker, size.width, size.depth), loader)
        return median(clock.host)

    learning = HeteroDDPStrategy(replan=8, process_group_backend="gloo", report=False)
    train(learning, size.learn)
    plans = learning.plan_history
    learned = plans[-1].plan.local_batch_sizes[0]
    around = {total // 2, *(min(max(learned + round(total * part), 1), total - 1) for part in size.tried)}
    seconds = {learned: [], **{one: [] for one in sorted(around)}}
    ddp = []
    for turn in range(2):
        for one in list(seconds)[:: 1 - 2 * turn]:
            fixed = HeteroDDPStrategy(local_batch_sizes=[one, total - one], process_group_backend="gloo", report=False)
            seconds[one].append(train(fixed, size.steps))
        ddp.append(train(DDPStrategy(process_group_backend="gloo"), size.steps))
    means = {one: float(np.mean(values)) for one, values in seconds.items()}
    return {"learned": learned, "plans": len(plans), "seconds": means, "ddp": float(np.mean(ddp))}


def case(figures, workers, size, real):
    """Train, and compare the learned split with the best that was tried."""
    found = ranks(_trainings, 2, workers, size, timeout=110)[0]
    total, learned = 2 * size.each, found["learned"]
    best = min(found["seconds"], key=found["seconds"].__getitem__)
    step, ideal = found["seconds"][learned], found["seconds"][best]
    share = ideal / step
    figures.add(
        {
            "learned split": f"{learned}/{total - learned}",
            "best split tried": f"{best}/{total - best}",
            "share of the best": share,
            "ms of a step": 1e3 * step,
            "ms with ddp": 1e3 * found["ddp"],
            "times the speed of ddp": found["ddp"] / step,
            "plans": found["plans"],
            "ms by split": {one: round(1e3 * seconds, 2) for one, seconds in sorted(found["seconds"].items())},
        }
    )
    figures.must(0 < learned < total, "a worker has no samples")
    figures.must(not real or share >= 0.97, f"the learned split has {share:.3f} of the best one's speed")


def unequal(figures, device):
    if device.type == "cpu":
        small = Size(width=4, depth=1, image=4, each=12, learn=20, steps=6, tried=(-0.1,), seconds=0.05)
        case(figures, [Worker(device, nap=nap) for nap in NAPS], small, False)
        return
    size, cpu = Size(), Worker(CPU, threads=max(1, (os.cpu_count() or 2) - 2))
    gpu, host = ranks(_speeds, 2, [Worker(device), cpu], size, timeout=40)
    rounds = max(1, round(host / gpu / 4)) if host / gpu > 8 else 1
    figures.add({"work of a sample on the GPU": rounds, "us of a sample": [1e6 * gpu * rounds, 1e6 * host]})
    case(figures, [Worker(device, rounds=rounds), cpu], size, True)
