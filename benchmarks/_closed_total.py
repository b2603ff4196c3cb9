"""A training whose total batch is decided on while it runs, on a simulated cluster of exactly known speed and noise."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from _closed_loop import Loop, Noise, Truth, job, totals

from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.policies.goodput import GoodputPlanner


@dataclass(frozen=True)
class Training:
    """A training that ends after so many samples.

    Args:
        truth: the cluster.
        initial: ``B_0``.
        largest: greatest total.
        noise: noise scale at the beginning and at the end, in samples.
        samples: samples at the efficiency of ``B_0`` that it takes.
    """

    truth: Truth
    initial: int
    largest: int
    noise: tuple[float, float]
    samples: float

    def noise_scale(self, progress: float) -> float:
        """Noise scale after a share of the training; it grows by the same factor in equal shares."""
        low, high = self.noise
        return float(low * (high / low) ** min(progress, 1.0))

    def goodput(self, total: int, seconds: float, progress: float) -> float:
        """Samples per second at the efficiency of ``B_0``."""
        phi = self.noise_scale(progress)
        return total / seconds * (phi + self.initial) / (phi + total)

    def brute_force(self, progress: float, grid: dict[int, float]) -> float:
        """The best goodput over a fine grid of totals, each with its exact optimum."""
        return max(self.goodput(total, seconds, progress) for total, seconds in grid.items())

    def grid(self, truth: Truth) -> dict[int, float]:
        """Seconds of the optimum at each of many totals."""
        sizes = np.unique(np.geomspace(max(self.initial / 8, truth.workers), self.largest, 60).astype(int))
        return {int(total): truth.optimum(int(total)) for total in sizes}


def training(speeds: tuple[float, ...], workload: str) -> Training:
    """A short training, of a few hundred steps if its total grows as it should."""
    truth = job(speeds, workload)
    middle = totals(truth)["communication"]
    initial = max(middle // 4, 2 * truth.workers)
    return Training(truth, initial, 64 * initial, (initial, 30.0 * initial), 1500.0 * initial)


@dataclass
class Ramp:
    """The run, step by step.

    Args:
        plan: of the training.
        noise: of times.
        planner: decides on the total.
        movement: factors on the times of each worker, by the share of the training that is done and the step.
        seed: of the random numbers.
    """

    plan: Training
    noise: Noise
    planner: GoodputPlanner
    movement: Callable[[float, int], np.ndarray]
    seed: int = 0
    shares: list[float] = field(default_factory=list)
    of_totals: list[float] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """Time to the end over the oracle's, and goodput over brute force while it runs."""
        training, rng = self.plan, np.random.default_rng(self.seed)
        loop = Loop(replace(self.planner, initial_total=training.initial), training.truth, training.initial, self.noise)
        scale, progress, seconds, oracle = RunningNoiseScale(horizon=60.0 * training.initial), 0.0, 0.0, 0.0
        factors: np.ndarray | None = None
        while progress < 1.0 and loop.step < 20_000:
            now = self.movement(progress, loop.step)
            if factors is None or not np.array_equal(now, factors):
                factors, loop.truth = now, training.truth.slowed(now)
                grid = training.grid(loop.truth)
            total, truth = loop.plan.total_batch_size, loop.truth
            taken = truth.time(np.maximum(loop.plan.local_batch_sizes, 1))
            phi = training.noise_scale(progress)
            best = training.brute_force(progress, grid)
            share = training.goodput(total, taken, progress) / best
            self.shares.append(share)
            self.of_totals.append(training.goodput(total, truth.optimum(total), progress) / best)
            done = total * (phi + training.initial) / (phi + total)
            progress, seconds, oracle = progress + done / training.samples, seconds + taken, oracle + done / best
            scale = scale.update(
                trace=phi * (1 + 0.4 * rng.standard_normal()),
                global_sq_norm=(1 + phi / total) * (1 + 0.1 * rng.standard_normal()),
                total_batch_size=total,
            )
            loop.extra["noise"] = scale
            loop.total = total
            loop.go(1)
        tail = self.shares[len(self.shares) // 2 :]
        return {
            "time": oracle / seconds,
            "goodput": float(np.median(tail)),
            "goodput of total": float(np.median(self.of_totals[len(self.of_totals) // 2 :])),
            "steps": loop.step,
            "changes": len(loop.changes),
        }
