"""Trainings on emulated devices: one process per device, which waits exactly as long as the device would compute.

All trainings of a cluster run one after the other in the same processes, which are forked when everything is imported.
"""

import logging
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy as np
import torch
from _clusters import LBBSP
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import BatchPlan, DynamicBatchPIDCallback, HeteroDDPStrategy
from lightning_hetero.callbacks import PerfModelCallback
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.core import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

WIDTH, LAYERS = 32, 8
EPOCH_STEPS = 50
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        policy: ``"ddp"``, or what chooses the split under ``hetero_ddp``: ``"even"``, ``"fixed"``, ``"perf_model"``,
            ``"pid"``, ``"lb_bsp"``, ``"script"``.
        profiles: of the devices, one per rank.
        total: total batch size.
        steps: of the training.
        seed: of the devices' jitter.
        sizes: the split, where it is fixed.
        script: ``{step: sizes}``, where the split follows a script.
    """

    policy: str
    profiles: tuple[DeviceProfile, ...]
    total: int
    steps: int
    seed: int = 0
    sizes: tuple[int, ...] | None = None
    script: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Numbers(Dataset[int]):
    """As many samples as one wants, each a number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def as_batch(indices: list[int]) -> torch.Tensor:
    """A batch of as many rows."""
    return torch.ones(len(indices), WIDTH)


class Layers(L.LightningModule):
    """Layers of equal size, whose computation takes a host next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Watch(L.Callback):
    """Seconds of each step, what the ranks observed, and the plans of a script at their steps."""

    def __init__(self, script: dict[int, tuple[int, ...]]) -> None:
        self.script, self.seconds, self.rows = script, [], []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.last = time.perf_counter()
        self._adopt(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        if hasattr(trainer.strategy, "observations"):
            seen = trainer.strategy.observations()
            if seen.num_steps and (not self.rows or seen is not self.rows[-1]):
                self.rows.append(seen)
        self._adopt(trainer)
        self.last = time.perf_counter()

    def _adopt(self, trainer: L.Trainer) -> None:
        if trainer.global_step in self.script:
            sizes = self.script[trainer.global_step]
            trainer.strategy.adopt(BatchPlan(sum(sizes), sizes), "script")


def _strategy(job: Job) -> tuple[Any, list[L.Callback]]:
    buckets: dict[str, Any] = {"bucket_cap_mb": 0.009, "process_group_backend": "gloo"}  # two layers a bucket
    if job.policy == "ddp":
        return L.pytorch.strategies.DDPStrategy(**buckets), []
    if job.policy == "fixed":
        return HeteroDDPStrategy(local_batch_sizes=job.sizes, **buckets), []
    if job.policy == "script":
        return HeteroDDPStrategy(policy="even", replan=10, **buckets), []
    callbacks: dict[str, Callable[[], L.Callback]] = {
        "perf_model": PerfModelCallback,
        "pid": DynamicBatchPIDCallback,
        "lb_bsp": lambda: PolicyCallback(LBBSP()),
    }
    return HeteroDDPStrategy(policy="even" if job.policy == "even" else None, **buckets), (
        [callbacks[job.policy]()] if job.policy in callbacks else []
    )


def train(job: Job) -> dict[str, Any]:
    """One training on this rank; what it took, its plans, and what the host added to the devices' times."""
    L.seed_everything(0, verbose=False)
    strategy, callbacks = _strategy(job)
    devices, watch = EmulatedDeviceCallback(job.profiles, seed=100 * job.seed), Watch(job.script)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=len(job.profiles),
        max_steps=job.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, devices, watch],
    )
    samples = max([job.total, *(sum(sizes) for sizes in job.script.values())]) * EPOCH_STEPS
    began = time.process_time()
    loader = DataLoader(Numbers(samples), job.total // len(job.profiles), shuffle=True, collate_fn=as_batch)
    trainer.fit(Layers(), loader)
    begin, plans = 0, []
    for entry in getattr(trainer.strategy, "plan_history", ()):
        begin = entry.epoch * EPOCH_STEPS + entry.step
        plans.append((begin, tuple(entry.plan.local_batch_sizes), entry.plan.step_time, entry.reason))
    return {
        "seconds": watch.seconds,
        "plans": plans,
        "rows": watch.rows,
        "device": _per_step(devices.device.times, "device"),
        "host": _per_step(devices.device.times, "host"),
        "processor_s": time.process_time() - began,
    }


def _per_step(times: Sequence[Any], name: str) -> list[float]:
    """Seconds of each step, of a forward and a backward pass."""
    seconds = [getattr(one, name) for one in times]
    return [a + p for a, p in zip(seconds[::2], seconds[1::2], strict=True)]


def _work(rank: int, world: int, port: int, jobs: Sequence[Job], connection: Any) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    launch = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    for number, job in enumerate(jobs):
        os.environ.update({name: str(value) for name, value in launch.items()}, MASTER_PORT=str(port + number))
        connection.send(train(job))
        torch.distributed.barrier()
    connection.close()
    os._exit(0)


def run(jobs: Sequence[Job], report: Callable[[Job, list[dict[str, Any]]], None]) -> None:
    """Run trainings of as many devices each, and report each one's results of all ranks as it ends."""
    world = len(jobs[0].profiles)
    fork, port = multiprocessing.get_context("fork"), random.SystemRandom().randrange(20_000, 31_000)
    pipes = [fork.Pipe(duplex=False) for _ in range(world)]
    workers = [
        fork.Process(target=_work, args=(rank, world, port, jobs, pipes[rank][1]), daemon=True) for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for _, sending in pipes:
        sending.close()
    try:
        for job in jobs:
            if not all(receiving.poll(TIMEOUT_S) for receiving, _ in pipes):
                raise SystemExit(f"{job.policy} on {world} devices did not end within {TIMEOUT_S:.0f} s.")
            report(job, [receiving.recv() for receiving, _ in pipes])
    finally:
        for worker in workers:
            worker.kill()


# the truth: nothing of the package's time model


def true_time(profiles: Sequence[DeviceProfile], sizes: Sequence[int]) -> float:
    """Seconds of a step without jitter: the slowest device's."""
    return max(p.q * b + p.s + p.k * b + p.m for p, b in zip(profiles, sizes, strict=True))


def optimum(profiles: Sequence[DeviceProfile], total: int) -> tuple[float, tuple[int, ...]]:
    """Least seconds of a step over all integer splits with at least one sample each, and a split that takes them."""
    sizes = [1] * len(profiles)
    for _ in range(total - len(profiles)):  # the next sample goes where it is done first
        after = [p.q * (b + 1) + p.s + p.k * (b + 1) + p.m for p, b in zip(profiles, sizes, strict=True)]
        sizes[after.index(min(after))] += 1
    return true_time(profiles, sizes), tuple(sizes)


def expected_time(profiles: Sequence[DeviceProfile], sizes: Sequence[int], draws: int = 4000) -> float:
    """Mean seconds of a step with the devices' jitter, by as many draws."""
    slowest = np.zeros(draws)
    for i, (profile, b) in enumerate(zip(profiles, sizes, strict=True)):
        factors, model = profile.factors(seed=10_000 + i), profile.model
        times = (next(factors) for _ in range(draws))
        seconds = np.array([f * model.forward_time(b) + g * model.backward_time(b) for f, g in times])
        slowest = np.maximum(slowest, seconds)
    return float(slowest.mean())


def slowest(results: Sequence[dict[str, Any]]) -> np.ndarray:
    """Seconds that the slowest device took in each step of a training, with its jitter."""
    return np.max([result["device"] for result in results], axis=0)


def first_within(plans: Sequence[tuple[int, tuple[int, ...], Any, Any]], profiles: Any, total: int, part: float) -> Any:
    """Step from which on every split is within a part of the optimum; ``None`` if the last one is not."""
    best, reached = optimum(profiles, total)[0], None
    for begin, sizes, *_ in plans:
        inside = true_time(profiles, sizes) <= (1 + part) * best
        reached = (begin if reached is None else reached) if inside else None
    return reached


def learned(rows: Sequence[StepObservations], totals: Sequence[int], workers: int) -> PerfModelPlanner:
    """A planner that has seen the steps of some totals."""
    planner = PerfModelPlanner()
    for seen in rows:
        for window in np.split(np.arange(seen.num_steps), _changes(seen)):
            total = int(seen.local_batch_sizes[window[0]].sum())
            if total in totals:
                part = StepObservations(*(getattr(seen, name)[window] for name in StepObservations.FIELDS))
                planner = planner.observe(part, context_of(total, workers))
    return planner


def _changes(seen: StepObservations) -> Any:
    return np.flatnonzero((np.diff(seen.local_batch_sizes, axis=0) != 0).any(axis=1)) + 1


def context_of(total: int, workers: int) -> PlanContext:
    """What a planner is told of a step of ``total`` samples."""
    return PlanContext(int(total), tuple(map(str, range(workers))), (1,) * workers)
