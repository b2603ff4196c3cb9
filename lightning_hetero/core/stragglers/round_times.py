"""Times of the newest steps of a sync round, by worker and phase, as the detection of stragglers takes them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.worker_times import since_jump
from lightning_hetero.core.stragglers.settings import StragglerSettings

__all__ = ["PHASES", "RoundTimes", "exposed_link"]

Array = npt.NDArray[np.float64]

PHASES = ("data", "forward", "backward", "optimizer")
"""Phases in which a worker itself is busy."""
_FIELDS = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


def exposed_link(observations: StepObservations) -> Array:
    """Return the seconds of each step from the last worker's last gradient to the end of its all-reduce.

    Example:
        >>> exposed_link(StepObservations.empty(2)).shape
        (0,)
    """
    ends = observations.bucket_ends
    if ends.shape[2] == 0 or not observations.num_steps:
        return np.asarray(observations.last_sync.min(axis=1))
    last = np.max(np.nan_to_num(ends, nan=0.0), axis=2)
    return np.asarray(np.maximum((last - observations.backward).min(axis=1), observations.last_sync.min(axis=1)))


@dataclass(frozen=True)
class RoundTimes:
    """Times of a round's newest steps, all at one split.

    Args:
        rows: computing seconds of the steps at this split, shape ``(steps, workers)``.
        sizes: samples of each worker.
        times: median seconds of the phases in a step, shape ``(workers, phases)``.
        compute: median computing seconds of each worker.
        error: standard error of ``compute``.
        step: seconds of a step.
        sync: seconds of all all-reduces but the last, and of the last, by the worker that waits least in them.
        sync_error: standard error of their sum.
        begins: seconds after which each worker has its first bucket.

    Example:
        >>> sizes, zeros = np.full((8, 2), 8.0), np.zeros((8, 2))
        >>> seen = StepObservations(sizes, zeros, zeros + [0.1, 0.3], zeros, zeros, zeros + 0.01, zeros + 0.31)
        >>> RoundTimes.of(seen, 1, StragglerSettings()).compute.tolist()
        [0.1, 0.3]
    """

    rows: Array
    sizes: Array
    times: Array
    compute: Array
    error: Array
    step: float
    sync: Array
    sync_error: float
    begins: Array

    @classmethod
    def of(cls, observations: StepObservations, accumulation: int, settings: StragglerSettings) -> "RoundTimes":
        """Take the newest half of the steps at one split and one speed, at least as many as the settings ask for."""
        sizes, own = observations.splits()[-1]
        count = own.stop - own.start - since_jump(observations.compute[own])
        newest = slice(own.stop - min(count, max(settings.min_steps, -(-count // 2))), own.stop)
        phases = [accumulation * getattr(observations, _FIELDS[name])[newest] for name in PHASES]
        rows = accumulation * observations.compute[own]
        recent, link = np.sum(phases, axis=0), exposed_link(observations)[newest]
        compute = np.median(recent, axis=0)
        seen = observations.rows(newest)
        sync = np.stack([seen.overlapped_sync.min(axis=1), seen.last_sync.min(axis=1)], axis=1)
        whole = sync.sum(axis=1, keepdims=True)
        step = np.nan_to_num(observations.step_time[newest])
        shortest = float(compute.max() + np.median(link))
        return cls(
            rows,
            np.asarray(sizes),
            np.stack([np.median(one, axis=0) for one in phases], axis=1),
            compute,
            _error(recent, compute),
            max(float(np.median(step)), shortest),
            np.median(sync, axis=0),
            float(_error(whole, np.median(whole, axis=0))[0]),
            np.median(recent - seen.backward + seen.first_bucket, axis=0),
        )

    @property
    def asks(self) -> Array:
        """The step that each worker alone asks for, with the link as it is."""
        return self.asked(*self.sync)

    def asked(self, overlapped: float, last: float) -> Array:
        """Return the step that each worker alone asks for if all-reduces take so long (C eq. 4).

        It takes its whole computing time and the last all-reduce, or all all-reduces after its first bucket.
        """
        return np.asarray(np.maximum(self.compute, self.begins + overlapped) + last)

    def steps_since(self, rank: int, level: float) -> int:
        """Return the newest steps in a row in which a worker took longer than a level."""
        below = np.flatnonzero(self.rows[:, rank] < level)
        return len(self.rows) if not len(below) else len(self.rows) - 1 - int(below[-1])


def _error(rows: Array, middle: Array) -> Array:
    """Return the standard error of medians of steps."""
    deviation = 1.4826 * np.median(np.abs(rows - middle), axis=0)
    return np.asarray(1.2533 * deviation / np.sqrt(len(rows)))
