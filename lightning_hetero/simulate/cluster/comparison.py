"""Comparison of a run on emulated devices with its simulation: the same profiles, seeds and total."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.simulate.cluster.result import SimulationResult
from lightning_hetero.simulate.cluster.simulator import ClusterSimulator
from lightning_hetero.simulate.devices.device_profile import DeviceProfile

__all__ = ["RunComparison", "compare_run", "simulate_run"]


def simulate_run(
    devices: Sequence[DeviceProfile], total_batch_size: int, steps: int, *, seed: int = 0, **settings: Any
) -> SimulationResult:
    """Simulate what a run on emulated devices does whose device ``i`` has the seed ``seed + i``.

    Args:
        devices: profile of each worker.
        total_batch_size: ``B``.
        steps: steps to run.
        seed: of the first device.
        settings: further arguments of :class:`ClusterSimulator`.

    Example:
        >>> result = simulate_run([DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.003, 0, 0.006, 0)], 40, 20)
        >>> result.seconds.round(2).tolist()[5:7], [entry.step for entry in result.plans]
        ([0.18, 0.1], [0, 6, 15])
    """
    return ClusterSimulator(devices, total_batch_size, seed=seed, **settings).run(steps)


@dataclass(frozen=True)
class RunComparison:
    """Difference of a run and its simulation, over the steps that both have.

    Args:
        seconds: of each step of the run over those of the simulation, less 1.
        samples: greatest difference of a worker's size in each step.
        last: greatest difference of a worker's size in the last plans.

    Example:
        >>> RunComparison(np.array([0.01, 0.03]), np.array([0, 1]), 1).median_difference
        0.02
    """

    seconds: npt.NDArray[np.float64]
    samples: npt.NDArray[np.int64]
    last: int

    @property
    def median_difference(self) -> float:
        """Median of the absolute differences of a step's seconds, as a share."""
        return float(np.median(np.abs(self.seconds)))

    @property
    def whole_difference(self) -> float:
        """Median difference of a step's seconds with its sign: what the run takes longer on the whole."""
        return float(np.median(self.seconds))


def compare_run(
    result: SimulationResult, seconds: Sequence[float], plans: Sequence[tuple[int, Sequence[int]]]
) -> RunComparison:
    """Compare a simulation with what a run measured.

    Args:
        result: the simulation, with the same workers all the time.
        seconds: of each step of the run.
        plans: ``(step, sizes)`` of each plan of the run, the first one from step 0 on.

    Raises:
        ValueError: if the plans do not begin at step 0, or are for another number of workers.

    Example:
        >>> devices = [DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.003, 0, 0.006, 0)]
        >>> result = simulate_run(devices, 40, 20)
        >>> again = compare_run(result, result.seconds * 1.01, [(0, (20, 20)), (7, (30, 10))])
        >>> round(again.median_difference, 3), again.samples.tolist()[5:8], again.last
        (0.01, [0, 13, 3], 0)
    """
    if not plans or plans[0][0] != 0 or any(len(sizes) != len(result.names) for _, sizes in plans):
        raise ValueError(
            f"plans={list(plans)!r} must be (step, sizes) pairs from step 0 on, with a size for each of the "
            f"{len(result.names)} workers."
        )
    steps = min(result.steps, len(seconds))
    starts, sizes = np.array([step for step, _ in plans]), np.array([own for _, own in plans])
    run = sizes[np.searchsorted(starts, np.arange(steps), side="right") - 1]
    apart = np.abs(result.sizes[:steps] - run).max(axis=1)
    last = np.abs(np.array(result.plans[-1].plan.local_batch_sizes) - sizes[-1]).max()
    return RunComparison(np.asarray(seconds, dtype=float)[:steps] / result.seconds[:steps] - 1.0, apart, int(last))
