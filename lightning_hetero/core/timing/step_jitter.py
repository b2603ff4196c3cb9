"""Jitter of the workers' single steps, and summary of a sync round by mean times and their variance.

The state of each worker is five fading sums: squared relative deviations outside of and in backward, their degrees of
freedom, odd steps, and all steps.
"""

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.times import EstimatorSettings
from lightning_hetero.core.timing.winsorized_mean import WINSORIZED_SHARE, num_winsorized, winsorize_top

__all__ = ["relative_variance", "summarise_round"]

Array = npt.NDArray[np.float64]


def summarise_round(
    jitter: Array, forward: Array, backward: Array, settings: EstimatorSettings
) -> tuple[Array, Array, Array]:
    """Return mean times of a round, their relative variance, and the jitter sums updated by this round.

    Args:
        jitter: sums of each worker so far, shape ``(workers, 5)``.
        forward: seconds outside of backward, shape ``(steps, workers)``.
        backward: seconds in backward, same shape.
        settings: of the estimator.

    Returns:
        Means of shape ``(workers, 2)``, their variance relative to their squares, and the new sums.

    Example:
        >>> seconds = np.array([[0.9], [1.1], [0.9], [1.1]])
        >>> times, variance, jitter = summarise_round(np.zeros((1, 5)), seconds, 2 * seconds, EstimatorSettings())
        >>> times.round(6).tolist(), jitter[0, 4].item()
        ([[1.0, 2.0]], 4.0)
    """
    count = len(forward)
    usual = np.sqrt(relative_variance(jitter, settings))
    rare = (jitter[:, 2] >= settings.own_jitter_steps) & (jitter[:, 3] <= WINSORIZED_SHARE * jitter[:, 4])
    limits = [
        np.where(rare, (1.0 + settings.odd * usual[:, i]) * np.median(x, axis=0), np.inf)
        for i, x in enumerate((forward, backward))
    ]
    odd = ((forward > limits[0]) | (backward > limits[1])).sum(axis=0)
    a, p = winsorize_top(np.minimum(forward, limits[0])), winsorize_top(np.minimum(backward, limits[1]))
    y = np.stack([a.mean(axis=0), p.mean(axis=0)], axis=1)
    y = np.maximum(y, np.maximum(settings.least_part * y.sum(axis=1, keepdims=True), 1e-9))
    free = max(count - 1 - 1.5 * num_winsorized(count), 0.0)  # degrees of freedom: capped times vary less
    squares = np.stack([((x - x.mean(axis=0)) ** 2).sum(axis=0) for x in (a, p)], axis=1) / y**2
    others = np.median(squares, axis=0) / max(free, 0.5)
    before = np.where(jitter[:, 2:3] >= settings.own_jitter_steps, usual**2, others)
    # a round counts with at most three times the usual deviation: one burst must not be remembered for long
    squares = np.minimum(squares, 9.0 * np.maximum(before, others) * max(free, 0.5))
    steps = np.stack([np.full(len(y), free), odd, np.full(len(y), float(count))], axis=1)
    fade = np.minimum(1.0, settings.jitter_memory / np.maximum(jitter[:, 4:] + count, 1.0))
    jitter = fade * (jitter + np.concatenate([squares, steps], axis=1))
    wide = settings.wide * squares / max(free, 0.5)
    variance = np.maximum(np.maximum(relative_variance(jitter, settings), wide), 1e-6) / count
    return y, variance, jitter


def relative_variance(jitter: Array, settings: EstimatorSettings) -> Array:
    """Return the squared relative noise of single steps: each worker's own where known, else that of all workers.

    Args:
        jitter: sums of each worker, shape ``(workers, 5)``.
        settings: of the estimator.

    Returns:
        Variances outside of and in backward, shape ``(workers, 2)``.

    Example:
        >>> relative_variance(np.zeros((1, 5)), EstimatorSettings(jitter=0.1)).round(6).tolist()
        [[0.01, 0.01]]
    """
    squares, steps = jitter[:, :2], jitter[:, 2:3]
    own = squares / np.maximum(steps, 0.5)
    # one noisy worker must not make the others uncertain
    usual = np.minimum(own, 4.0 * np.median(own, axis=0) + 1e-12)
    prior = settings.jitter_steps
    shared = ((usual * steps).sum(axis=0) + prior * settings.jitter**2) / (steps.sum() + prior)
    count = settings.own_jitter_steps
    return np.asarray((squares + count * shared) / (steps + count))
