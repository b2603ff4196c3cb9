"""Estimate ``gamma``, ``t_o`` and ``t_u`` from the steps of one round (Cannikin, eq. 12)."""

import numpy as np
import numpy.typing as npt

__all__ = ["estimate_gamma", "estimate_sync_times"]

Array = npt.NDArray[np.float64]


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


def estimate_sync_times(overlapped: Array, last: Array) -> tuple[float, float]:
    """``t_o`` and ``t_u``: the minimum over workers of each step, then the median over steps (Cannikin, eq. 12).

    Whoever comes last does not wait, so the smallest of the workers' times is the network's own.

    Example:
        >>> estimate_sync_times(np.array([[0.5, 0.2]]), np.array([[0.03, 0.4]]))
        (0.2, 0.03)
    """
    return float(np.median(overlapped.min(axis=1))), float(np.median(last.min(axis=1)))
