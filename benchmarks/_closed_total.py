"""A training whose total batch is decided on while it runs, on a simulated cluster of exactly known speed and noise."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from _clusters import Cluster, Noise, job, simulator, totals

from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.simulate import NoiseTrajectory


@dataclass(frozen=True)
class Training:
    """A training that ends after so many samples.

    Args:
        cluster: the workers.
        initial: ``B_0``.
        largest: greatest total.
        noise: noise scale at the beginning and at the end, in samples.
        samples: samples at the efficiency of ``B_0`` that it takes.
    """

    cluster: Cluster
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

    def grid(self, optimum: Callable[[int], float]) -> dict[int, float]:
        """Seconds of the optimum at each of many totals."""
        sizes = np.unique(np.geomspace(max(self.initial / 8, self.cluster.workers), self.largest, 60).astype(int))
        return {int(total): optimum(int(total)) for total in sizes}


def training(speeds: tuple[float, ...], workload: str) -> Training:
    """A short training, of a few hundred steps if its total grows as it should."""
    cluster = job(speeds, workload)
    middle = totals(cluster)["communication"]
    initial = max(middle // 4, 2 * cluster.workers)
    return Training(cluster, initial, 64 * initial, (initial, 30.0 * initial), 1500.0 * initial)


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
        training, progress, seconds, oracle, changes = self.plan, 0.0, 0.0, 0.0, 0
        gradients = NoiseTrajectory(lambda samples: training.noise_scale(progress))
        run = simulator(
            self.planner, training.cluster, training.initial, self.noise, noise_scale=gradients, seed=self.seed
        )
        factors: np.ndarray | None = None
        while progress < 1.0 and run.step < 20_000:
            now = self.movement(progress, run.step)
            if factors is None or not np.array_equal(now, factors):
                run.slow_down(now)
                factors, grid = now, training.grid(lambda total: run.optimum(total)[0])
            total, before = run.plan.total_batch_size, run.plan
            taken = run.time(before)
            phi = training.noise_scale(progress)
            best = training.brute_force(progress, grid)
            self.shares.append(training.goodput(total, taken, progress) / best)
            self.of_totals.append(training.goodput(total, run.optimum(total)[0], progress) / best)
            done = total * (phi + training.initial) / (phi + total)
            progress, seconds, oracle = progress + done / training.samples, seconds + taken, oracle + done / best
            run.advance(1)
            changes += run.plan is not before
        tail = self.shares[len(self.shares) // 2 :]
        return {
            "time": oracle / seconds,
            "goodput": float(np.median(tail)),
            "goodput of total": float(np.median(self.of_totals[len(self.of_totals) // 2 :])),
            "steps": run.step,
            "changes": changes,
        }
