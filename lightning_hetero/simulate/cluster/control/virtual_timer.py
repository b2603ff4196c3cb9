"""Rows of measurements that the timers of a run would report of simulated steps."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings
from lightning_hetero.comm.timing.warm_up import WarmUp
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.simulate.cluster.truth.step_events import StepTimes

__all__ = ["StepMeasurements", "VirtualTimer"]

Array = npt.NDArray[np.float64]


class StepMeasurements(Protocol):
    """Source of what a sync round knows of the steps before it."""

    @property
    def change_cost(self) -> float | None:
        """Cost of a change of size as rank 0 measures it."""

    def see(self, times: StepTimes) -> None:
        """Take note of some steps."""

    def take(self) -> StepObservations:
        """Return the rows since the last call."""


class VirtualTimer:
    """Timers of all ranks: warm-up steps give no row, nor does the first step of a new size on any rank.

    A row needs the step on every rank, so that a step which one rank leaves out is left out.

    Args:
        workers: number of ranks.
        settings: which steps count, and how many are kept.
    """

    def __init__(self, workers: int, settings: TimingSettings = SETTINGS) -> None:
        self._workers, self._settings, self._skip = workers, settings, settings.warm_up_steps
        self._first_rank, self._sizes = WarmUp(settings), np.zeros(0)
        self._rows: list[StepObservations] = []
        self._interrupted = True

    @property
    def change_cost(self) -> float | None:
        """Cost of a change of size as rank 0 measures it."""
        return self._first_rank.change_cost

    def shorten_warm_up(self) -> None:
        """Time the second step already."""
        self._skip = min(self._skip, 1)
        self._first_rank.shorten()

    def see(self, times: StepTimes) -> None:
        """Take note of some steps."""
        if len(self._sizes) and not np.array_equal(times.sizes, self._sizes):
            self._skip = max(self._skip, 1)
        self._sizes = times.sizes
        self._time_first_rank(int(times.sizes[0]), times.seconds)
        left_out = min(self._skip, len(times.a))
        self._skip -= left_out
        first = max(left_out, len(times.a) - self._settings.max_steps)
        if first < len(times.a):
            seen = times.observed(first)
            if self._interrupted and first == 0:
                seen.step_time[0] = np.nan
            self._rows.append(seen)
        self._interrupted = False

    def _time_first_rank(self, size: int, seconds: Sequence[float] | Array) -> None:
        if size != self._first_rank.size:
            self._first_rank.change_size(size)
        for second in seconds:
            if not self._first_rank.settling:
                break
            self._first_rank.end_step(float(second))

    def take(self) -> StepObservations:
        """Return the rows since the last call, the newest that fit; the step time after it is unknown."""
        rows, self._rows, self._interrupted = self._rows, [], True
        if not rows:
            return StepObservations.empty(self._workers)
        kept = self._settings.max_steps
        fields = {n: np.concatenate([getattr(r, n) for r in rows])[-kept:] for n in StepObservations.FIELDS}
        return StepObservations(**fields, bucket_ends=_joined([r.bucket_ends for r in rows])[-kept:])


def _joined(ends: Sequence[Array]) -> Array:
    """Return the ends of all steps' buckets, with NaN for a bucket that a step did not have."""
    most = max(own.shape[2] for own in ends)
    missing = [((0, 0), (0, 0), (0, most - own.shape[2])) for own in ends]
    return np.concatenate([np.pad(own, m, constant_values=np.nan) for own, m in zip(ends, missing, strict=True)])
