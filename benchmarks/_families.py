"""Families of clusters on which a planner that fits lines may fail: times by tiles, heavy noise, drifts, few samples.

Everything is said through the public interface of :class:`lightning_hetero.simulate.ClusterSimulator`: devices by their
times, noise and slowdowns by functions. A case has a seed, by which speeds, sizes and totals differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from lightning_hetero import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal
from lightning_hetero.simulate import ClusterSimulator, LinkProfile

Noise = Callable[[np.random.Generator, int, int], np.ndarray]
Shape = Callable[[float, float], float]
"""Multiple of the time of one sample that a device of some speed takes for a batch."""


@dataclass(frozen=True)
class Shaped:
    """A device whose times have any shape: a third of them outside of the backward pass.

    Args:
        speed: relative to the others.
        shape: of its time without the fixed part.
        fixed: seconds of the fixed part.
        name: of the hardware.
    """

    speed: float
    shape: Shape
    fixed: float = 0.015
    name: str = ""

    def times(self, batch_size: int) -> tuple[float, float]:
        """Return the seconds outside of the backward pass, and in it."""
        whole = 3e-3 / self.speed * self.shape(float(batch_size), self.speed) + self.fixed
        return whole / 3, whole * 2 / 3


def line(samples: float, speed: float) -> float:
    """In proportion."""
    return samples


def tiles(width: int) -> Shape:
    """Kernels run in whole tiles."""
    return lambda samples, speed: float(np.ceil(samples / width) * width)


def falls(factor: float, beyond: int) -> Shape:
    """Beyond some samples, of fast devices more, all of a batch takes longer."""
    return lambda samples, speed: samples * (factor if samples > beyond * speed else 1.0)


def curved(power: float) -> Shape:
    """Throughput that rises or falls with the samples, the same as a line at 40 of them."""
    return lambda samples, speed: 40.0 * (samples / 40.0) ** power


def gauss(deviation: float) -> Noise:
    """Independent from step to step."""
    return lambda rng, step, workers: np.maximum(1.0 + deviation * rng.standard_normal(workers), 0.2)


def heavy(deviation: float) -> Noise:
    """Log-normal, of mean 1."""
    return lambda rng, step, workers: np.exp(deviation * rng.standard_normal(workers) - deviation**2 / 2)


def slowly(deviation: float, memory: float) -> Noise:
    """Noise that goes on for some steps."""
    level: dict[str, np.ndarray] = {}

    def noise(rng: np.random.Generator, step: int, workers: int) -> np.ndarray:
        kept, fresh = np.exp(-1.0 / memory), rng.standard_normal(workers)
        level["now"] = kept * level.get("now", fresh) + np.sqrt(1.0 - kept**2) * fresh
        return np.maximum(1.0 + deviation * level["now"], 0.2)

    return noise


def stalls(factor: float, every: int) -> Noise:
    """Single steps take many times as long."""
    return lambda rng, step, workers: (
        gauss(0.03)(rng, step, workers) * np.where(rng.random(workers) < 1.0 / every, factor, 1.0)
    )


def first(workers: int, factor: float) -> np.ndarray:
    """Factors of which only the first worker's is not 1."""
    return np.where(np.arange(workers) == 0, factor, 1.0)


@dataclass(frozen=True)
class Family:
    """Cases of one kind.

    Args:
        shape: of the devices' times.
        workers: how many.
        each: samples of a worker on average.
        spread: speed of the fastest over that of the slowest.
        noise: of the steps, made anew for each run.
        slowdown: ``(step, workers, rng of the case) -> factors``.
        steps: of a run.
        fixed: fixed share of a step at the mean size.
    """

    shape: Shape = line
    workers: int = 4
    each: int = 48
    spread: float = 4.0
    noise: Callable[[], Noise] = lambda: gauss(0.03)
    slowdown: Callable[[int, int, int], np.ndarray] | None = None
    steps: int = 500
    fixed: float = 0.25


def swing(step: int, workers: int, seed: int) -> np.ndarray:
    """Speeds go up and down, one after the other."""
    return np.exp(0.2 * np.sin(2 * np.pi * (step // 4 * 4 / (120 + 20 * seed) + np.arange(workers) / workers)))


def walk(step: int, workers: int, seed: int) -> np.ndarray:
    """Logarithms of speeds do a random walk that comes back."""
    rng = np.random.default_rng(seed)
    return np.exp(WALKS.setdefault((workers, seed), _walked(rng, workers))[step // 8])


def _walked(rng: np.random.Generator, workers: int) -> np.ndarray:
    rows = [np.zeros(workers)]
    for _ in range(200):
        rows.append(0.98 * rows[-1] + 0.04 * rng.standard_normal(workers))
    return np.array(rows)


WALKS: dict[tuple[int, int], np.ndarray] = {}

FAMILIES: dict[str, Family] = {
    "tile 16": Family(tiles(16), each=80),
    "tile 32": Family(tiles(32), workers=5, each=128),
    "tile 32, 8 workers": Family(tiles(32), workers=8, each=96),
    "step 1.5": Family(falls(1.5, 30), workers=3),
    "step 1.8": Family(falls(1.8, 36), workers=4),
    "throughput falls": Family(curved(1.35)),
    "throughput rises": Family(curved(0.7)),
    "quadratic": Family(curved(2.0), each=75),
    "log-normal 0.3": Family(noise=lambda: heavy(0.3)),
    "log-normal 0.5": Family(noise=lambda: heavy(0.5)),
    "equal, log-normal 0.3": Family(workers=6, spread=1.0, noise=lambda: heavy(0.3)),
    "equal, 15 %": Family(workers=8, spread=1.0, noise=lambda: gauss(0.15)),
    "noise of 20 steps": Family(noise=lambda: slowly(0.1, 20.0)),
    "stalls": Family(noise=lambda: stalls(10.0, 60)),
    "boost": Family(slowdown=lambda step, n, seed: first(n, 0.6 if step < 60 + 10 * seed else 1.0)),
    "thermal": Family(slowdown=lambda step, n, seed: first(n, 1.0 + 0.6 * (1.0 - np.exp(-(step // 4 * 4) / 150)))),
    "neighbour": Family(steps=800, slowdown=lambda step, n, seed: first(n, 3.0 if step % 200 >= 150 else 1.0)),
    "swing": Family(steps=600, slowdown=swing),
    "walk": Family(steps=800, slowdown=walk),
    "jump": Family(slowdown=lambda step, n, seed: first(n, 2.0 if step >= 150 + 3 * seed else 1.0)),
    "2 samples each": Family(workers=3, each=2, fixed=0.5),
    "4 samples each": Family(workers=4, each=4, fixed=0.5, spread=3.0),
    "40 steps": Family(workers=3, steps=40),
    "100 workers": Family(workers=100, steps=200),
}


def simulated(name: str, planner: Planner | None, seed: int, *, mean: bool = False) -> ClusterSimulator:
    """The run of a family; with ``mean``, one whose slowdowns are their mean over the run."""
    family, rng = FAMILIES[name], np.random.default_rng([seed, 7])
    n = family.workers
    speeds = np.exp(np.log(family.spread) * np.sort(rng.random(n)))
    speeds[[0, -1]] = 1.0, family.spread
    each = max(int(family.each * rng.uniform(0.8, 1.25)), 2)
    fixed = family.fixed / (1.0 - family.fixed) * 3e-3 * family.shape(each, 1.0)
    devices = [Shaped(float(v), family.shape, fixed, f"device {i}") for i, v in enumerate(speeds[::-1])]
    step = 3e-3 * each * n / speeds.sum() + fixed
    slowdown = None
    if family.slowdown is not None:
        path = [family.slowdown(step, n, seed) for step in range(family.steps)]
        average = np.mean(path, axis=0)
        slowdown = (lambda step: average) if mean else (lambda step: path[min(step, family.steps - 1)])
    return ClusterSimulator(
        devices,
        each * n,
        link=LinkProfile(gradient_bytes=0.2 * step * 1e9 * n / (2 * (n - 1)), rate=1e9),
        policy=planner,
        seed=seed,
        noise=family.noise(),
        slowdown=slowdown,
        change_cost=0.0,
    )


def run(name: str, planner: Planner | None, seed: int) -> dict[str, Any]:
    """Share of the optimum, at the end and over all steps; speed relative to the best fixed split; changes."""
    steps, best = FAMILIES[name].steps, simulated(name, None, seed, mean=True)
    fixed = simulated(name, None, seed)
    fixed.adopt(BatchPlan(best.plan.total_batch_size, tuple(best.optimum()[1].tolist())))
    found = simulated(name, planner, seed)
    seconds, result = fixed.run(steps).seconds.sum(), found.run(steps)
    tail = slice(-max(steps // 4, 10), None)
    costs = [round_.decision_seconds for round_ in result.rounds]
    return {
        "share": float(result.optimum[tail].sum() / result.exact[tail].sum()),
        "mean share": result.share_since(0),
        "speed": float(seconds / found.clock),
        "changes": len(result.plans) - 1,
    } | ({"decision ms": 1e3 * float(np.median(costs))} if costs else {})


@dataclass(frozen=True)
class OneLine:
    """The plain alternative: a line of each worker with forgetting, drawn to the origin, and one threshold.

    Args:
        rows: sizes, seconds outside of backward and in it, and steps, of each round.
        noise: relative standard deviation of a step.
    """

    moves_total: ClassVar[bool] = False
    rows: tuple[tuple[np.ndarray, np.ndarray, np.ndarray, float], ...] = ()
    noise: float = 0.05
    memory: float = field(default=256.0)

    def initial(self, context: PlanContext) -> Proposal | None:
        return None

    def lines(self) -> np.ndarray:
        """Slope and fixed part of the two phases, columns ``q``, ``s``, ``k``, ``m``."""
        sizes, *phases = (np.array([row[i] for row in self.rows]) for i in range(3))
        steps, columns = np.array([row[3] for row in self.rows])[:, None], []
        for seconds in phases:
            weight = steps / np.maximum(seconds, 1e-9) ** 2
            size, mean = ((weight * x).sum(axis=0) / weight.sum(axis=0) for x in (sizes, seconds))
            spread = (weight * (sizes - size) ** 2).sum(axis=0)
            product = (weight * (sizes - size) * (seconds - mean)).sum(axis=0)
            prior = 1e-4 * weight.sum(axis=0) * size**2
            slope = np.clip((product + prior * mean / size) / (spread + prior), 0.0, mean / size)
            columns += [slope, np.maximum(mean - slope * size, 0.0)]
        return np.stack(columns, axis=1)

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        planner, elapsed = self, max(context.elapsed or 0, observations.num_steps)
        for split, own in observations.splits():
            a, p = (np.median(x[own], axis=0) for x in (observations.outside_backward, observations.backward))
            step, sizes = observations.compute[own], np.maximum(split, 1.0)
            rows = [(b, x, y, n * np.exp(-elapsed / self.memory)) for b, x, y, n in planner.rows]
            if len(step) > 3:
                spread = 1.48 * float(np.median(np.abs(step / np.median(step, axis=0) - 1.0)))
                planner = replace(planner, noise=0.8 * planner.noise + 0.2 * spread)
            if rows:
                q, s, k, m = planner.lines().T
                off = (a + p) / ((q + k) * sizes + s + m)
                jumped = np.abs(off - 1.0) > max(5.0 * planner.noise / len(step) ** 0.5, 0.08)
                scale = np.where(jumped & (np.abs(np.log(sizes / rows[-1][0])) < 0.3), off, 1.0)
                rows = [(b, x * scale, y * scale, n) for b, x, y, n in rows]
            planner = replace(planner, rows=(*rows, (sizes, a, p, float(len(step))))[-64:])
        link = [float(np.median(x.min(axis=1))) for x in (observations.overlapped_sync, observations.last_sync)]
        gamma = float(np.median(observations.first_bucket / np.maximum(observations.backward, 1e-12)))
        nodes = tuple(NodeTimeModel(*row) for row in planner.lines().tolist())
        model = ClusterTimeModel(nodes, min(gamma, 1.0), *link)
        plan = solve_optperf(model, context.total_batch_size, min_local=context.min_local, max_local=context.max_local)
        gain = 1.0 - model.step_time(plan.local_batch_sizes) / model.step_time(current.local_batch_sizes)
        luck = 2.0 * planner.noise * (2.0 * np.log(max(len(nodes), 2)) / max(observations.num_steps, 1)) ** 0.5
        if gain < max(0.01, luck, context.hysteresis):
            return Decision(planner)
        return Decision(planner, Proposal(plan, "one line"), soon=gain > 0.02)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def loaded(self, state: dict[str, Any]) -> "OneLine":
        return OneLine()
