"""Clusters of the closed loop with planners: their workers, workloads and noise, and policies to compare with.

The loop itself, and the exact optimum of every step, are :class:`lightning_hetero.simulate.ClusterSimulator`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.truth.factors import Factors
from lightning_hetero.simulate.cluster.truth.optimum import CostLines, best_split

Array = npt.NDArray[np.float64]

EXCHANGE = 1.5e-3
"""Seconds of an exchange without its decision."""


@dataclass(frozen=True)
class Cluster:
    """Workers and their link."""

    devices: tuple[DeviceProfile, ...]
    link: LinkProfile

    @classmethod
    def of(cls, q: Array, s: Array, k: Array, m: Array, link: LinkProfile) -> "Cluster":
        """Make it of the times of all workers, ``a = q b + s`` and ``P = k b + m``."""
        rows = zip(*(np.asarray(times, float).tolist() for times in (q, s, k, m)), strict=True)
        return cls(tuple(DeviceProfile(*row) for row in rows), link)

    @property
    def workers(self) -> int:
        return len(self.devices)

    @cached_property
    def coefficients(self) -> Array:
        """Rows ``q``, ``s``, ``k`` and ``m`` of all workers."""
        return np.array([[getattr(device, name) for device in self.devices] for name in "qskm"])

    @cached_property
    def lines(self) -> CostLines:
        """Step time that each worker asks for."""
        return CostLines.of(self.coefficients, self.link.ready_shares, self.link.seconds(self.workers))

    @property
    def t_o(self) -> float:
        """Seconds of averaging that can overlap with the backward pass."""
        return float(self.link.seconds(self.workers)[:-1].sum())

    @property
    def t_u(self) -> float:
        """Seconds of averaging that cannot."""
        return float(self.link.seconds(self.workers)[-1])

    def part(self, workers: Sequence[int]) -> "Cluster":
        """The cluster of some of the workers."""
        return replace(self, devices=tuple(self.devices[i] for i in workers))

    def computes(self, sizes: Sequence[int] | Array) -> npt.NDArray[np.bool_]:
        """Whether computing, not the link, bounds each worker at its size (Cannikin, sec. 3.2)."""
        _, _, k, m = self.coefficients
        return np.asarray((1 - self.link.gamma) * (k * np.asarray(sizes) + m) >= self.t_o)

    def time(self, sizes: Sequence[int] | Array) -> float:
        """Seconds of a step without noise."""
        return float(self.lines.seconds(sizes).max())

    def best(self, total: int) -> tuple[float, npt.NDArray[np.int64]]:
        """Least seconds of a step over all integer splits, at least one sample each, and a split that takes them."""
        return best_split(self.lines, total, np.ones(self.workers), np.full(self.workers, float(total)))

    def optimum(self, total: int) -> float:
        """The seconds of :meth:`best`."""
        return self.best(total)[0]


class Noise:
    """Factors on times: log-normal for each step, worker and phase.

    Args:
        sigma: standard deviation of one time.
        slow: share of the variance that is one slow drift of the worker, which returns within 40 steps. The drift is
            a speed: :attr:`drift` has its factors in the newest steps.
        spikes: probability of a step that takes three times as long.
        seed: of the random numbers.
    """

    def __init__(self, sigma: float, *, slow: float = 0.0, spikes: float = 0.0, seed: int = 0) -> None:
        self.rng, self.sigma, self.drifts, self.spikes = np.random.default_rng(seed), sigma, slow, spikes
        self.count = 1
        self.state: Array | None = None
        self.drift: Array | None = None

    def take(self, steps: int) -> Factors:
        """Factors of the next steps; those of a drift are speeds, which the optimum follows."""
        devices = self.workers(steps, self.count)
        return Factors(np.tile(self.slow(), (steps, 1)), devices, self.link(steps), self.first(steps, self.count))

    def slow(self) -> Array:
        """Factors of the drift in the newest steps: nobody knows the next ones."""
        return np.ones(self.count) if self.drift is None else self.drift

    def change(self, stay: Mapping[int, int], devices: Sequence[DeviceProfile], seeds: Sequence[int]) -> None:
        """Go on with as many workers."""
        self.count = len(devices)

    def of(self, workers: int) -> "Noise":
        """Draw for so many workers from now on."""
        self.count = workers
        return self

    def workers(self, steps: int, workers: int) -> Array:
        """Factors of shape ``(steps, workers, 2)``."""
        z = self.rng.standard_normal((steps, workers, 2)) * self.sigma * np.sqrt(1 - self.drifts)
        if self.drifts:
            keep, drift = np.exp(-1 / 40), np.empty((steps, workers))
            state = self.rng.standard_normal(workers) if self.state is None else self.state
            for t in range(steps):
                state = keep * state + np.sqrt(1 - keep**2) * self.rng.standard_normal(workers)
                drift[t] = state
            self.state = state
            z = z + self.sigma * np.sqrt(self.drifts) * drift[:, :, None]
            self.drift = np.exp(self.sigma * np.sqrt(self.drifts) * drift.mean(axis=0))
        factors: Array = np.exp(z - 0.5 * self.sigma**2)
        if self.spikes:
            factors = factors * np.where(self.rng.random((steps, workers, 1)) < self.spikes, 3.0, 1.0)
        return factors

    def link(self, steps: int) -> Array:
        """Factors on the seconds of averaging."""
        return np.asarray(np.exp(self.rng.standard_normal(steps) * self.sigma))

    def first(self, steps: int, workers: int) -> Array:
        """Factors on the time to the first bucket."""
        return np.asarray(np.exp(self.rng.standard_normal((steps, workers)) * self.sigma))


NOISES: dict[str, dict[str, float]] = {
    "0 %": {"sigma": 0.0},
    "2 %": {"sigma": 0.02},
    "8 %": {"sigma": 0.08},
    "15 %": {"sigma": 0.15},
    "8 % half slow": {"sigma": 0.08, "slow": 0.5},
    "2 % spikes": {"sigma": 0.02, "spikes": 0.03},
}

# clusters: speeds relative to the fastest worker


def many(workers: int) -> tuple[float, ...]:
    """Three generations of devices, a quarter, a quarter and a half, each within 7 % of its kind."""
    quarter = workers // 4
    kinds = np.repeat([1.0, 0.5, 1 / 3.42], [quarter, quarter, workers - 2 * quarter])
    return tuple(kinds * np.random.default_rng(1).uniform(0.93, 1.07, workers))


CLUSTERS: dict[str, tuple[float, ...]] = {
    "A": (1.0, 0.64, 0.27),
    "B": (1.0,) * 4 + (0.5,) * 4 + (1 / 3.42,) * 8,
    "C": tuple(np.linspace(1.0, 0.25, 16)),
    "100": many(100),
    "1000": many(1000),
}

# seconds per sample of the fastest worker, fixed seconds outside of and in backward, bytes of gradients
WORKLOADS: dict[str, tuple[float, float, float, float]] = {
    "ResNet50": (2.5e-3, 0.010, 0.008, 102e6),
    "ResNet18": (1.0e-4, 0.006, 0.004, 44e6),
    "DeepSpeech2": (1.5e-2, 0.012, 0.010, 208e6),
    "BERT": (2.0e-2, 0.015, 0.012, 440e6),
    "NeuMF": (6e-6, 0.003, 0.002, 21e6),
}


def job(speeds: Sequence[float], workload: str = "ResNet50", *, gbit: float = 10.0, forward: float = 0.35) -> Cluster:
    """A workload on workers of these speeds, joined by a ring; three tenths of fixed times follow the speed."""
    (per_sample, outside, inside, num_bytes), v = WORKLOADS[workload], np.asarray(speeds, float)
    fixed, buckets = 0.7 + 0.3 / v, max(2, int(np.ceil(num_bytes / 25e6)) + 1)
    rows = forward * per_sample / v, outside * fixed, (1 - forward) * per_sample / v, inside * fixed
    ring = 2 * (len(v) - 1) / len(v) * num_bytes / (gbit / 8 * 1e9)  # also of a part of the workers
    return Cluster.of(*rows, LinkProfile(latency=ring / buckets, buckets=buckets))


def totals(cluster: Cluster) -> dict[str, int]:
    """Totals at which the optimum is bound by communication, by both, and by computing."""
    q, s, k, m = cluster.coefficients
    grid = np.unique(np.geomspace(2 * cluster.workers, 80_000 * cluster.workers, 160).astype(int))
    bound = []
    for total in grid:
        b = np.maximum((cluster.optimum(int(total)) - cluster.t_u - s - m) / (q + k), 1.0)
        bound.append(int(cluster.computes(b).sum()))
    computing = np.array(bound)
    none, every = np.flatnonzero(computing == 0), np.flatnonzero(computing == cluster.workers)
    found = {}
    if len(none):
        found["communication"] = int(grid[none[int(len(none) * 0.85)]])
    if len(none) and len(every):
        between = slice(int(none[-1]), int(every[0]) + 1)
        half = int(np.argmin(np.abs(computing[between] - cluster.workers / 2)))
        found["mixed"] = int(grid[between][half])
    if len(every):
        found["compute"] = int(grid[every[0]] * 3)
    return found


# policies


@dataclass
class LBBSP:
    """LB-BSP as Cannikin describes it: the slowest worker hands five samples to the fastest, look by look."""

    moves_total: bool = False
    step: int = 5

    def initial(self, context: PlanContext) -> Proposal | None:
        return None

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        sizes = np.array(current.local_batch_sizes)
        seconds = np.median(observations.compute, axis=0)
        slow, fast = int(np.argmax(np.where(sizes > 1, seconds, 0.0))), int(np.argmin(seconds))
        move = min(self.step, int(sizes[slow]) - 1)
        if slow == fast or move < 1 or seconds[slow] < 1.02 * seconds[fast]:
            return Decision(self)
        sizes[slow] -= move
        sizes[fast] += move
        return Decision(self, Proposal(BatchPlan(current.total_batch_size, tuple(sizes.tolist())), "five samples"))

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def loaded(self, state: dict[str, Any]) -> "LBBSP":
        return self


@dataclass
class Oracle(LBBSP):
    """Knows all speeds at each look, and whether they move, and takes the exact optimum.

    No planner that has sync rounds as often can do better.
    """

    simulator: ClusterSimulator | None = None
    before: Array | None = None

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        assert self.simulator is not None
        now, before = self.simulator.coefficients(), self.before
        plan = BatchPlan(context.total_batch_size, tuple(self.simulator.optimum()[1].tolist()))
        moving, self.before = before is not None and not np.array_equal(now, before), now
        same = plan.local_batch_sizes == current.local_batch_sizes
        return Decision(self, None if same else Proposal(plan, "known"), moving=moving)


POLICIES: dict[str, Callable[[], Planner | None]] = {
    "perf_model": PerfModelPlanner,
    "pid": ProportionalPlanner,
    "lb_bsp": LBBSP,
    "even": lambda: None,
    "oracle": Oracle,
}


def simulator(
    planner: Planner | None,
    cluster: Cluster,
    total: int,
    noise: Noise,
    *,
    names: Sequence[str] | None = None,
    cost: float | None = None,
    **more: Any,
) -> ClusterSimulator:
    """A run on a cluster; a round takes :data:`EXCHANGE`, and its decision ``cost`` or its processor time."""
    found = ClusterSimulator(
        cluster.devices,
        total,
        link=cluster.link,
        policy=planner,
        names=[f"device {i}" for i in range(cluster.workers)] if names is None else names,
        change_cost=0.0,
        round_seconds=lambda taken: EXCHANGE + (taken if cost is None else cost),
        factors=noise.of(cluster.workers),
        **more,
    )
    if isinstance(planner, Oracle):
        planner.simulator = found
    return found
