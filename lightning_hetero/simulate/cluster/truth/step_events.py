"""Events of a synchronous step (C sec. 3.2): when buckets are ready, when each is averaged, what timers see of it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations

__all__ = ["StepTimes", "bucket_times"]

Array = npt.NDArray[np.float64]


def bucket_times(a: Array, p: Array, shares: Array, seconds: Array) -> Array:
    """Return when each bucket is averaged: once all workers have it and the one before is done, plus its all-reduce.

    Args:
        a: seconds outside of the backward pass, shape ``(steps, workers)``.
        p: seconds of the backward pass, the same shape.
        shares: share of the backward pass after which each bucket is ready, shape ``(buckets,)``.
        seconds: of each bucket's all-reduce, shape ``(steps, buckets)``.

    Returns:
        Seconds from the beginning of the step, shape ``(steps, buckets)``; the last one ends the step.

    Example:
        >>> a, p = np.array([[1.0, 2.0]]), np.array([[4.0, 1.0]])
        >>> bucket_times(a, p, np.array([0.5, 1.0]), np.array([[1.0, 1.0]])).tolist()
        [[4.0, 6.0]]
    """
    done, end = np.empty(seconds.shape), np.full(len(a), -np.inf)
    for j, share in enumerate(shares):
        end = np.maximum(end, (a + p * share).max(axis=1)) + seconds[:, j]
        done[:, j] = end
    return done


@dataclass(frozen=True)
class StepTimes:
    """Times of some steps that ran at one split.

    Args:
        sizes: samples of each worker.
        a: seconds of each step and worker outside of the backward pass.
        p: seconds of the backward pass.
        shares: share of the backward pass after which each bucket is ready.
        done: when each bucket was averaged, shape ``(steps, buckets)``.
        first: factor on the measured time until the first bucket, ``None`` for an exact measurement.
        planned: samples of each worker that count; a worker with none runs its minimum with weight 0. By default all.
    """

    sizes: Array
    a: Array
    p: Array
    shares: Array
    done: Array
    first: Array | None = None
    planned: Array = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.planned is None:
            object.__setattr__(self, "planned", self.sizes)

    @property
    def seconds(self) -> Array:
        """Seconds of each step."""
        return np.asarray(self.done[:, -1])

    @property
    def idle(self) -> Array:
        """Share of each step for which each worker computes nothing."""
        seconds = np.maximum(self.seconds[:, None], 1e-300)  # a step of devices that take no time takes none
        return np.asarray(1.0 - (self.a + self.p) / seconds)

    def observed(self, since: int = 0) -> StepObservations:
        """Return what the workers' timers see of the steps from ``since`` on, as a run's would."""
        a, p, done = self.a[since:], self.p[since:], self.done[since:]
        overlapped, before = np.zeros_like(a), np.full((len(a), 1), -np.inf)
        for j, share in enumerate(self.shares):
            sync = done[:, j : j + 1] - np.maximum(a + p * share, before)
            before = done[:, j : j + 1]
            if j < len(self.shares) - 1:
                overlapped += sync
        first = p * self.shares[0]
        return StepObservations(
            np.broadcast_to(self.sizes, a.shape).copy(),
            forward=a,
            backward=p,
            first_bucket=first if self.first is None else first * self.first[since:],
            overlapped_sync=overlapped,
            last_sync=sync,
            step_time=np.broadcast_to(done[:, -1:], a.shape).copy(),
            bucket_ends=done[:, None, :] - a[:, :, None],
        )
