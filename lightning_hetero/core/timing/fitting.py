"""Estimators of ``gamma``, ``t_o`` and ``t_u`` from the steps of one sync round (C eq. 12), and a robust line fit."""

import math

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations

__all__ = ["estimate_gamma", "estimate_sync_times", "fit_line", "steps_that_tell"]

Array = npt.NDArray[np.float64]

SAME_END = 0.05
"""Greatest difference between the workers' ends of the all-reduce that counts as the same time, as a share of it."""


def estimate_gamma(first_bucket: Array, backward: Array) -> float:
    """Estimate the share of the backward pass before the first bucket, by inverse variance (C eq. 12).

    Args:
        first_bucket: seconds to the first bucket, shape ``(steps, workers)``.
        backward: seconds of the backward pass, same shape.

    Returns:
        ``sum_i(gamma_i / var_i) / sum_i(1 / var_i)``, in 0 to 1. Unlike in the paper, ``gamma_i`` is a median and
        ``var_i`` follows from the median absolute deviation, plus 1e-6, so single odd steps count little.

    Example:
        >>> estimate_gamma(np.array([[0.1, 0.4]]), np.array([[0.2, 0.8]]))
        0.5
    """
    ratio = np.clip(first_bucket / np.maximum(backward, 1e-12), 0.0, 1.0)
    center = np.median(ratio, axis=0)
    variance = (1.4826 * np.median(np.abs(ratio - center), axis=0)) ** 2 + 1e-6
    return float(np.clip((center / variance).sum() / (1.0 / variance).sum(), 0.0, 1.0))


def steps_that_tell(seen: StepObservations, accumulation: int = 1) -> npt.NDArray[np.bool_]:
    """Find the steps whose smallest all-reduce time is the link's own, without waiting for another worker.

    The worker that comes last does not wait. Two kinds of steps have a worker that never waits: those in which the same
    worker is last with both its first and its last bucket, and those in which the link is still busy with earlier
    buckets, so the all-reduce ends at the same time for all workers. In all other steps one worker is last at first and
    another one later, and both wait. Their times then exceed the link's own, the more the more buckets there are.

    Args:
        seen: observed steps.
        accumulation: micro-batches of a step, of which the last one is synchronized.

    Example:
        >>> ones = np.ones((1, 2))
        >>> late_first, late_last = np.array([[1.2, 1.0]]), np.array([[1.0, 1.5]])
        >>> seen = StepObservations(ones, late_first, late_last, 0.2 * late_last, ones, ones, ones)
        >>> steps_that_tell(seen).tolist()
        [False]
    """
    a, p, n = seen.outside_backward, seen.backward, accumulation
    begins = n * a + (n - 1) * p + seen.first_bucket
    same = np.logical_and(*(x == x.max(axis=1, keepdims=True) for x in (begins, a + p))).any(axis=1)
    ends, least = begins + seen.overlapped_sync, seen.overlapped_sync.min(axis=1)
    return np.asarray(same | (np.ptp(ends, axis=1) <= SAME_END * least))


def estimate_sync_times(
    overlapped: Array, last: Array, tells: npt.NDArray[np.bool_] | None = None
) -> tuple[float, float]:
    """Estimate ``t_o`` and ``t_u``: the minimum over workers, then the median over steps (C eq. 12).

    The worker that comes last does not wait, so the smallest of the workers' times is the network's own.

    Args:
        overlapped: seconds of the all-reduce of all buckets but the last, shape ``(steps, workers)``.
        last: seconds of the all-reduce of the last bucket, same shape.
        tells: steps that count for ``t_o``, see :func:`steps_that_tell`; all by default. If none counts, ``t_o`` is the
            least of all steps, an upper bound.

    Example:
        >>> estimate_sync_times(np.array([[0.5, 0.2]]), np.array([[0.03, 0.4]]))
        (0.2, 0.03)
    """
    t_o = overlapped.min(axis=1)
    if tells is None or tells.any():
        t_o = t_o if tells is None else t_o[tells]
        return float(np.median(t_o)), float(np.median(last.min(axis=1)))
    return float(t_o.min()), float(np.median(last.min(axis=1)))


def fit_line(x: Array, y: Array, weight: Array | None = None, *, iterations: int = 20) -> tuple[float, float]:
    """Fit a robust line ``y = slope x + intercept`` with both coefficients ``>= 0``.

    Minimizes the Huber loss of the *relative* residuals (timings vary in proportion to their length) by iteratively
    re-weighted least squares; each iteration is solved exactly over the non-negative quadrant.

    Args:
        x: positions, shape ``(n,)``.
        y: values, shape ``(n,)``, ``>= 0``.
        weight: weight of each point, e.g. its number of repetitions or its age.
        iterations: greatest number of re-weightings.

    Returns:
        ``(slope, intercept)``; through the origin if all ``x`` are equal.

    Example:
        >>> slope, intercept = fit_line(np.array([1.0, 2, 3, 4]), np.array([3.0, 5, 7, 90]))
        >>> round(slope, 3), round(intercept, 3)
        (2.0, 1.0)
    """
    w = np.ones_like(y) if weight is None else np.asarray(weight, dtype=float)
    scale = np.maximum(y, 1e-3 * max(float(y.max()), 1e-12))
    base = w / scale**2
    robust = np.ones_like(y)
    line = (0.0, 0.0)
    for _ in range(iterations):
        previous, line = line, _non_negative_line(x, y, base * robust)
        if len(y) <= 2 or all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(line, previous, strict=True)):
            break
        residual = np.abs(y - line[0] * x - line[1]) / scale
        spread = 1.4826 * float(np.median(residual))
        cut = 1.345 * max(spread, 1e-9)
        robust = np.minimum(1.0, cut / np.maximum(residual, 1e-300))
    return line


def _non_negative_line(x: Array, y: Array, w: Array) -> tuple[float, float]:
    """Solve weighted least squares over ``slope, intercept >= 0``: inside, else at the better of the two edges."""
    total = w.sum()
    x_mean, y_mean = (w * x).sum() / total, (w * y).sum() / total
    spread = (w * (x - x_mean) ** 2).sum()
    through_origin = (float((w * x * y).sum() / max((w * x * x).sum(), 1e-300)), 0.0)
    if spread <= 1e-12 * total * max(x_mean, 1e-12) ** 2:
        return through_origin
    slope = float((w * (x - x_mean) * (y - y_mean)).sum() / spread)
    intercept = float(y_mean - slope * x_mean)
    if slope >= 0 and intercept >= 0:
        return slope, intercept
    flat = (0.0, float(y_mean))
    return min(through_origin, flat, key=lambda line: float((w * (y - line[0] * x - line[1]) ** 2).sum()))
