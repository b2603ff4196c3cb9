"""Clusters and workloads of the evaluation of dynamic batching (D), and their simulation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _dynamic_batching_rule import AsPrinted

from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.result import SimulationResult
from lightning_hetero.simulate.devices.catalog import device_profile, workload_named

LEVELS: dict[int, tuple[int, ...]] = {
    1: (13, 13, 13),
    2: (9, 12, 18),
    4: (5, 14, 20),
    6: (4, 11, 24),
    8: (3, 12, 24),
    10: (2, 17, 20),
}
"""Cores of three servers at each H-level (D sec. IV-A): 39 in all. The paper gives those of 2 and 10."""


def bound(speeds: Sequence[float]) -> float:
    """Most that any split of one total gains over an even one, if times are in proportion to sizes: mean over least.

    Example:
        >>> bound((9, 12, 18))
        1.4444444444444444
    """
    return float(np.mean(speeds) / np.min(speeds))


WORKLOADS: dict[str, tuple[str, int]] = {
    "ResNet-50": ("resnet50-cifar10", 64),
    "MNIST CNN": ("cnn-mnist", 100),
    "linear regression": ("linear-barcrawl", 100),
}
"""Published workload and samples per worker of each model; the paper gives no batch sizes."""

NEVER = 1_000_000
"""Interval of decisions that no run reaches, in steps."""
LINEAR_WORK = 0.028
"""Share of linear regression's fixed time that its samples take on 13 cores: what gains the reported 15 % at most."""


def server(cores: int, model: str, serial: float = 0.0, jitter: float = 0.0) -> DeviceProfile:
    """Profile of a server by the published table, under Amdahl's law.

    Args:
        cores: of the server.
        model: one of :data:`WORKLOADS`.
        serial: share of the work of a sample that one core has to do alone.
        jitter: of all times.
    """
    workload, batch = WORKLOADS[model]
    profile = device_profile(f"{cores} cores", workload, jitter)
    if model == "linear regression":
        fixed = profile.s + profile.m
        profile = replace(profile, q=LINEAR_WORK * fixed / batch * 13 / cores)
    slower = serial * cores + 1 - serial
    return replace(profile, q=profile.q * slower, k=profile.k * slower)


def link_of(model: str, rate: float) -> LinkProfile:
    """Link that carries the gradients of a model at some bits per second, in buckets of 25 MB."""
    size = workload_named(WORKLOADS[model][0]).gradient_bytes
    return LinkProfile(size, rate / 8, buckets=max(2, math.ceil(size / 25e6) + 1))


@dataclass(frozen=True)
class Measured:
    """Figures of a simulation.

    Args:
        seconds: per sample, over the whole run.
        steady: seconds per sample in its last third.
        changes: of the plan.
        near: steps until the split stays within 5 % of the optimum of the given total, per sample; infinite if never.
        total: of the last step.
        sizes: of the last step.
    """

    seconds: float
    steady: float
    changes: int
    near: float
    total: int
    sizes: tuple[int, ...]


def run_simulator(
    devices: Sequence[DeviceProfile],
    total: int,
    planner: Planner | None,
    *,
    steps: int,
    seed: int,
    link: LinkProfile | None = None,
    capacities: Sequence[float] = (),
    every: int | None = None,
) -> SimulationResult:
    """Simulate a run.

    Args:
        devices: of the cluster.
        total: samples of a step to begin with.
        planner: policy, ``None`` for equal sizes.
        steps: number of steps.
        seed: of the jitter.
        link: of the workers.
        capacities: peak of each worker, for open loop.
        every: steps between two decisions, which then cost nothing; the package's schedule and its cost without.
    """
    options: dict[str, Any] = {} if every is None else {"replan": every, "round_seconds": 0.0}
    options |= {"link": link, "policy": planner, "seed": 100 * seed, "capacities": capacities}
    return ClusterSimulator(devices, total, **options).run(steps)


def simulate(devices: Sequence[DeviceProfile], total: int, planner: Planner | None, **options: Any) -> Measured:
    """Figures of :func:`run_simulator`."""
    result = run_simulator(devices, total, planner, **options)
    steps, clock = len(result.clock), result.clock
    late = steps - steps // 3
    link = options.get("link")
    best = ClusterSimulator([replace(one, jitter=0.0, slowdown=()) for one in devices], total, link=link).optimum()[0]
    outside = np.flatnonzero(result.exact / result.totals > 1.05 * best / total)
    near = 0 if not len(outside) else int(outside[-1]) + 1
    return Measured(
        float(clock[-1] / result.samples[-1]),
        float((clock[-1] - clock[late - 1]) / (result.samples[-1] - result.samples[late - 1])),
        int((np.diff(result.sizes, axis=0) != 0).any(axis=1).sum()),
        near if near < steps else math.inf,
        int(result.totals[-1]),
        tuple(int(size) for size in result.sizes[-1]),
    )


def trajectory(
    devices: Sequence[DeviceProfile], total: int, planner: Planner | None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Samples of each step of :func:`run_simulator`, and the seconds at its end."""
    result = run_simulator(devices, total, planner, **options)
    return result.totals, result.clock


def policies(cores: Sequence[float]) -> dict[str, tuple[Planner | None, int | None]]:
    """Planner of each policy, and its interval of decisions.

    The paper's decides after every step, for free. Those that decide nothing have no sync rounds to wait for.
    """
    return {
        "even": (None, NEVER),
        "static": (StaticPlanner(), NEVER),
        "printed": (AsPrinted(), 1),
        "printed open": (AsPrinted(start=tuple(map(float, cores))), 1),
        "pid": (ProportionalPlanner(start="equal"), None),
        "pid open": (ProportionalPlanner(), None),
        "perf_model": (PerfModelPlanner(), None),
    }
