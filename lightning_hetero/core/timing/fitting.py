"""Estimate ``gamma``, ``t_o`` and ``t_u`` from the steps of one round (Cannikin, eq. 12)."""

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations

__all__ = ["estimate_gamma", "estimate_sync_times", "steps_that_tell"]

Array = npt.NDArray[np.float64]

TOGETHER = 0.05
"""Share of the time of averaging by which workers may differ in when it ends, to be taken for one time."""


def estimate_gamma(first_bucket: Array, backward: Array) -> float:
    """Share of the backward pass before the first bucket, by inverse variance over workers (Cannikin, eq. 12).

    Args:
        first_bucket: seconds to the first bucket, shape ``(steps, workers)``.
        backward: seconds of the backward pass, same shape.

    Returns:
        ``sum_i(gamma_i / var_i) / sum_i(1 / var_i)``, in 0 to 1.

    Example:
        >>> estimate_gamma(np.array([[0.1, 0.4]]), np.array([[0.2, 0.8]]))
        0.5
    """
    ratio = np.clip(first_bucket / np.maximum(backward, 1e-12), 0.0, 1.0)
    center = np.median(ratio, axis=0)
    variance = (1.4826 * np.median(np.abs(ratio - center), axis=0)) ** 2 + 1e-6
    return float(np.clip((center / variance).sum() / (1.0 / variance).sum(), 0.0, 1.0))


def steps_that_tell(seen: StepObservations, accumulation: int = 1) -> npt.NDArray[np.bool_]:
    """Steps in which the smallest time of averaging is the link's own, and not some worker's waiting as well.

    Whoever comes last does not wait. Two kinds of steps have a worker that never does: those in which the same worker
    is the last with its first bucket and with its last one, and those in which the link is still busy with what came
    before, so that averaging ends at one time for all. In the others one worker is late early on and another one later,
    and both wait: what they measure is more than the link takes, by the more the more buckets there are.

    Args:
        seen: observed steps.
        accumulation: micro-batches of a step, of which the last one is synchronised.

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
    return np.asarray(same | (np.ptp(ends, axis=1) <= TOGETHER * least))


def estimate_sync_times(
    overlapped: Array, last: Array, tells: npt.NDArray[np.bool_] | None = None
) -> tuple[float, float]:
    """``t_o`` and ``t_u``: the minimum over workers of each step, then the median over steps (Cannikin, eq. 12).

    Whoever comes last does not wait, so the smallest of the workers' times is the network's own.

    Args:
        overlapped: seconds of averaging all buckets but the last, shape ``(steps, workers)``.
        last: of the last one.
        tells: steps that count for ``t_o``, see :func:`steps_that_tell`; all by default. Without one, the least of all
            steps is the closest.

    Example:
        >>> estimate_sync_times(np.array([[0.5, 0.2]]), np.array([[0.03, 0.4]]))
        (0.2, 0.03)
    """
    t_o = overlapped.min(axis=1)
    if tells is None or tells.any():
        t_o = t_o if tells is None else t_o[tells]
        return float(np.median(t_o)), float(np.median(last.min(axis=1)))
    return float(t_o.min()), float(np.median(last.min(axis=1)))
