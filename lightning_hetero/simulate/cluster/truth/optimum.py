"""Exact optimum of a split by bisection over the step time, independent of the solver that planners use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CostCurves", "CostLines", "Costs", "best_split"]

Array = npt.NDArray[np.float64]


class Costs(Protocol):
    """Step time that each worker asks for by itself, which does not fall with its samples."""

    def seconds(self, sizes: Sequence[int] | Array) -> Array:
        """Return the seconds that each worker asks for at its size."""

    def capacity(self, seconds: float, low: Array, high: Array) -> Array:
        """Return the most samples with which each worker keeps within some seconds, between its bounds."""


@dataclass(frozen=True)
class CostCurves:
    """Step time that workers ask for whose times are any function of their samples.

    Args:
        times: returns ``a`` and ``P`` of all workers at their sizes, each of shape ``(workers,)``.
        shares: share of the backward pass after which each bucket is ready.
        buckets: seconds of each bucket's all-reduce.
    """

    times: Callable[[Array], Array]
    shares: Array
    buckets: Array

    def seconds(self, sizes: Sequence[int] | Array) -> Array:
        """Return the seconds that each worker asks for at its size."""
        a, p = self.times(np.asarray(sizes, dtype=float))
        after = np.cumsum(self.buckets[::-1])[::-1]
        return np.asarray((a + p * self.shares[:, None] + after[:, None]).max(axis=0))

    def capacity(self, seconds: float, low: Array, high: Array) -> Array:
        """Return the most samples with which each worker keeps within some seconds, between its bounds."""
        within, beyond = low, high + 1.0
        while (beyond - within > 1.0).any():
            middle = np.floor(0.5 * (within + beyond))
            fits = self.seconds(middle) <= seconds * (1.0 + 1e-12)
            within, beyond = np.where(fits, middle, within), np.where(fits, beyond, middle)
        return np.asarray(within)


@dataclass(frozen=True)
class CostLines:
    """Step time that each worker asks for by itself, the greatest of some lines in its samples (C eq. 7).

    Line ``j`` is the time at which the worker has bucket ``j``, plus the all-reduces of that bucket and of all after
    it: the step cannot end before.

    Args:
        slope: seconds per sample, shape ``(lines, workers)``, ``>= 0``.
        offset: seconds, the same shape.
    """

    slope: Array
    offset: Array

    @classmethod
    def of(cls, coefficients: Array, shares: Array, seconds: Array) -> "CostLines":
        """Make them of the time models of workers and the buckets of a link.

        Args:
            coefficients: rows ``q``, ``s``, ``k``, ``m``, shape ``(4, workers)``.
            shares: share of the backward pass after which each bucket is ready.
            seconds: of each bucket's all-reduce.
        """
        q, s, k, m = coefficients
        after = np.cumsum(seconds[::-1])[::-1]
        return cls(q + k * shares[:, None], s + m * shares[:, None] + after[:, None])

    def seconds(self, sizes: Sequence[int] | Array) -> Array:
        """Return the seconds that each worker asks for at its size."""
        return np.asarray((self.slope * np.asarray(sizes, dtype=float) + self.offset).max(axis=0))

    def capacity(self, seconds: float, low: Array, high: Array) -> Array:
        """Return the most samples with which each worker keeps within some seconds, between its bounds."""
        left = seconds - self.offset + 1e-12 * seconds
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(self.slope > 0, np.floor(left / self.slope), np.where(left >= 0, np.inf, -np.inf))
        return np.asarray(np.clip(most.min(axis=0), low, high))


def best_split(lines: Costs, total: int, low: Array, high: Array) -> tuple[float, npt.NDArray[np.int64]]:
    """Return the least seconds of a step over all integer splits, and a split that takes them.

    Args:
        lines: step time of each worker.
        total: samples of a step.
        low: fewest samples of each worker.
        high: most samples of each worker.

    Raises:
        ValueError: if no split keeps the bounds.

    Example:
        >>> lines = CostLines(np.array([[0.001, 0.003]]), np.zeros((1, 2)))
        >>> seconds, sizes = best_split(lines, 40, np.ones(2), np.full(2, 40.0))
        >>> round(seconds, 6), sizes.tolist()
        (0.03, [30, 10])
    """
    low, high = np.minimum(low, total), np.minimum(high, total)
    if not low.sum() <= total <= high.sum():
        raise ValueError(
            f"a total batch of {total} samples does not fit workers that take {low.sum():.0f} to {high.sum():.0f} "
            "together. Change the total or the bounds (min_local, memory of the profiles)."
        )
    fast, slow = float(lines.seconds(low).max()), float(lines.seconds(high).max())
    if lines.capacity(fast, low, high).sum() >= total:
        slow = fast
    while slow - fast > 1e-13 * slow:
        middle = 0.5 * (fast + slow)
        if middle in (fast, slow):
            break
        fast, slow = (fast, middle) if lines.capacity(middle, low, high).sum() >= total else (middle, slow)
    sizes = lines.capacity(slow, low, high)
    sizes = _trimmed(lines, sizes, total, low)
    return float(lines.seconds(sizes).max()), sizes.astype(np.int64)


def _trimmed(lines: Costs, sizes: Array, total: int, low: Array) -> Array:
    """Return the sizes without what is too much of them, taken one by one from those that finish last."""
    left, sizes = int(sizes.sum()) - total, sizes.copy()
    while left > 0:
        may = np.flatnonzero(sizes > low)
        last = may[np.argsort(-lines.seconds(sizes)[may], kind="stable")[:left]]
        sizes[last] -= 1
        left -= len(last)
    return sizes
