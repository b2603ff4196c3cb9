"""Expectation and error of the largest of several uncertain values: the time of a step that waits for all workers."""

import math

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.normal import normal_cdf

__all__ = ["expected_maximum", "larger_error"]

Array = npt.NDArray[np.float64]

MANY = 500
"""Values from which on those that are nearly alike are counted together."""
ALIKE = 0.05
"""Width of the bins of such values: in deviations for means, and as a ratio for deviations."""


def expected_maximum(mean: Array, deviation: Array) -> tuple[float, float]:
    """Return the mean and standard deviation of the largest of independent normal values.

    A step waits for the worker that is slowest in that step, so it takes longer than the mean time of any worker. The
    result is a quadrature of ``1 - prod_i Phi((x - mean_i) / deviation_i)``.

    Args:
        mean: mean of each value.
        deviation: standard deviation of each value, ``>= 0``.

    Returns:
        Both in the unit of the values, accurate to 0.5 % of the largest deviation.

    Example:
        >>> round(expected_maximum(np.zeros(2), np.ones(2))[0], 2)  # 1 / sqrt(pi)
        0.56
    """
    top = int(np.argmax(mean))
    widest = float(deviation.max())
    if widest <= 1e-12 * max(abs(float(mean[top])), 1e-300):
        return float(mean[top]), 0.0
    low = float((mean - 5.0 * deviation).max())
    near = mean + 6.0 * deviation > low
    if not near.any():  # the largest is certain
        return low, 0.0
    mean, deviation = mean[near], np.maximum(deviation[near], 1e-9 * widest)
    count = np.ones(len(mean))
    if len(mean) > MANY:
        mean, deviation, count = counted_together(mean, deviation)
    x = np.linspace(low, float((mean + 6.0 * deviation).max()), 33)
    below = (normal_cdf((x[:, None] - mean) / deviation) ** count).prod(axis=1)
    way = below - below[0] + (x - low) / (x[-1] - low)  # finer where it rises: some deviations may be far smaller
    x = np.interp(np.linspace(0.0, way[-1], 65), way, x)
    above = 1.0 - (normal_cdf((x[:, None] - mean) / deviation) ** count).prod(axis=1)
    weight = np.convolve(np.diff(x), [0.5, 0.5])  # trapezoids
    first = float(weight @ above)
    second = 2.0 * float(weight @ (above * (x - low))) - first**2
    return low + first, math.sqrt(max(second, 0.0))


def counted_together(mean: Array, deviation: Array) -> tuple[Array, Array, Array]:
    """Return means and deviations of bins of values that are nearly alike, and the number of values in each.

    Example:
        >>> mean, deviation, count = counted_together(np.array([1.0, 1.001, 2.0]), np.full(3, 0.1))
        >>> mean.round(4).tolist(), count.tolist()
        ([1.0005, 2.0], [2.0, 1.0])
    """
    level = np.floor(np.log(deviation) / math.log1p(ALIKE))
    place = np.floor((mean - mean.min()) / (ALIKE * np.exp(level * math.log1p(ALIKE))))
    code = level - level.min() + (np.ptp(level) + 1.0) * place
    _, which, number = np.unique(code, return_inverse=True, return_counts=True)
    count = number.astype(float)
    return np.bincount(which, mean) / count, np.bincount(which, deviation) / count, count


def larger_error(x: Array, x_error: Array, y: Array, y_error: Array, covariance: Array) -> Array:
    """Return the standard deviation of the larger of two normal values (Clark, 1961), pair by pair.

    Args:
        x: mean of the first value of each pair.
        x_error: its standard deviation, ``>= 0``.
        y: mean of the second value of each pair.
        y_error: its standard deviation, ``>= 0``.
        covariance: covariance of the two values of each pair.

    Example:
        >>> x, y, ones = np.array([0.0, 9.0, 0.0]), np.zeros(3), np.ones(3)
        >>> larger_error(x, ones, y, 2 * ones, np.array([0.0, 0.0, 2.0])).round(2).tolist()
        [1.31, 1.0, 1.53]
    """
    both = x_error**2 + y_error**2
    apart = np.sqrt(np.maximum(both - 2.0 * covariance, 1e-12 * both + 1e-300))
    z = np.clip((x - y) / apart, -30.0, 30.0)
    share, density = normal_cdf(z), np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    more = x - y  # moments about y keep all digits
    mean = more * share + apart * density
    square = (more**2 + x_error**2) * share + y_error**2 * (1.0 - share) + more * apart * density
    return np.asarray(np.sqrt(np.maximum(square - mean**2, np.minimum(x_error, y_error) ** 2 / 4.0)))
