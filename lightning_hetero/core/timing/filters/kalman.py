"""Kalman filters for many workers at once, with the state ``theta = (q, s, k, m)`` of ``a = q b + s``, ``P = k b + m``.

All functions take arrays of shape ``(..., 4)`` and ``(..., 4, 4)``; an observation is ``(a, P) = H(b) theta + noise``.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["gain_of", "mixed", "non_negative", "possible", "surprise", "update"]

Array = npt.NDArray[np.float64]


def gain_of(covariance: Array, b: Array) -> Array:
    """Return ``P H^T`` of shape ``(..., 4, 2)``.

    Example:
        >>> gain_of(np.eye(4)[None], np.array([2.0])).tolist()
        [[[2.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 1.0]]]
    """
    b = b[:, None]
    return np.stack([covariance[..., 0] * b + covariance[..., 1], covariance[..., 2] * b + covariance[..., 3]], axis=-1)


def _innovation(gain: Array, noise: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """Return ``S = H P H^T + R`` as its three entries, and its determinant."""
    aa = gain[..., 0, 0] * b + gain[..., 1, 0] + noise[..., 0, 0]
    ap = gain[..., 0, 1] * b + gain[..., 1, 1] + noise[..., 0, 1]
    pp = gain[..., 2, 1] * b + gain[..., 3, 1] + noise[..., 1, 1]
    return aa, ap, pp, np.maximum(aa * pp - ap * ap, 1e-9 * aa * pp)


def surprise(gain: Array, noise: Array, off: Array, b: Array) -> Array:
    """Return ``off^T S^-1 off``: about 2 where the filter is right.

    Example:
        >>> b, noise = np.array([1.0]), np.eye(2)[None]
        >>> surprise(gain_of(np.eye(4)[None], b), noise, np.array([[3.0, 0.0]]), b).tolist()  # 9 / (1 + 1 + 1)
        [3.0]
    """
    return _squared(*_innovation(gain, noise, b), off)


def _squared(aa: Array, ap: Array, pp: Array, determinant: Array, off: Array) -> Array:
    """Return ``off^T S^-1 off`` by the entries of ``S``."""
    x, z = off[..., 0], off[..., 1]
    return np.asarray((pp * x * x - 2 * ap * x * z + aa * z * z) / determinant)


def possible(mean: Array, covariance: Array) -> Array:
    """Return the log probability that no coefficient is negative: minus half the squared standard deviations below 0.

    This approximates the tail of a normal distribution without its slowly varying factor.

    Example:
        >>> possible(np.array([[2.0, -3.0, 1.0, 0.0]]), np.eye(4)[None]).tolist()
        [-4.5]
    """
    variance = np.maximum(np.einsum("...ii->...i", covariance), 1e-300)
    return np.asarray(-0.5 * (np.minimum(mean, 0.0) ** 2 / variance).sum(axis=-1))


_SLOPE, _FIXED, _SLOPE_BACKWARD, _FIXED_BACKWARD = np.eye(4)[:, None, :]


def update(mean: Array, covariance: Array, gain: Array, noise: Array, off: Array, b: Array) -> tuple[Array, ...]:
    """Return mean, covariance and log likelihood after an observation that differs by ``off`` from the expected one.

    Example:
        >>> b, prior = np.array([1.0]), np.eye(4)[None]
        >>> mean, _, _ = update(np.zeros((1, 4)), prior, gain_of(prior, b), np.eye(2)[None], np.array([[3.0, 0.0]]), b)
        >>> mean.round(6).tolist()
        [[1.0, 1.0, 0.0, 0.0]]
    """
    aa, ap, pp, determinant = _innovation(gain, noise, b)
    inverse = np.stack([np.stack([pp, -ap], axis=-1), np.stack([-ap, aa], axis=-1)], axis=-2)
    inverse /= determinant[..., None, None]
    weight = gain @ inverse  # K, (..., 4, 2)
    mean = mean + (weight * off[..., None, :]).sum(axis=-1)
    left = -weight[..., :, :1] * b[:, None, None] @ _SLOPE - weight[..., :, 1:] * b[:, None, None] @ _SLOPE_BACKWARD
    left = left - weight[..., :, :1] @ _FIXED - weight[..., :, 1:] @ _FIXED_BACKWARD + np.eye(4)
    covariance = left @ covariance @ left.swapaxes(-1, -2) + weight @ noise @ weight.swapaxes(-1, -2)  # Joseph's form
    return mean, covariance, -0.5 * (_squared(aa, ap, pp, determinant, off) + np.log(determinant))


def mixed(weight: Array, means: Array, covariances: Array) -> tuple[Array, Array]:
    """Return the mean and covariance of a mixture over the first axis.

    Example:
        >>> mean, covariance = mixed(np.array([0.5, 0.5]), np.array([[0.0], [2.0]]), np.ones((2, 1, 1)))
        >>> mean.tolist(), covariance.tolist()
        ([1.0], [[2.0]])
    """
    mean = (weight[..., None] * means).sum(axis=0)
    apart = means - mean
    inner = covariances + apart[..., :, None] * apart[..., None, :]
    return mean, (weight[..., None, None] * inner).sum(axis=0)


def non_negative(mean: Array, covariance: Array) -> tuple[Array, Array]:
    """Condition the posterior on non-negative coefficients: negative ones become zero.

    Example:
        >>> covariance = np.eye(4)[None] - 0.5 * (np.eye(4)[[1, 0, 2, 3]] * [1, 1, 0, 0])
        >>> non_negative(np.array([[2.0, -1.0, 1.0, 0.0]]), covariance)[0].tolist()
        [[1.5, 0.0, 1.0, 0.0]]
    """
    mean, covariance = mean.copy(), covariance.copy()
    rounding = 1e-12 * np.abs(np.einsum("nii->ni", covariance))
    for _ in range(4):  # one that becomes zero may make another one negative
        for i in (1, 3, 0, 2):
            at = np.flatnonzero(mean[:, i] < 0.0)
            if len(at) == 0:
                continue
            column = covariance[at, :, i]
            own = covariance[at, i, i]
            share = column / np.where(own > rounding[at, i], own, np.inf)[:, None]
            mean[at] -= share * mean[at, i][:, None]
            covariance[at] -= share[:, :, None] * column[:, None, :]
            mean[at, i] = 0.0
            covariance[at, i, :] = covariance[at, :, i] = 0.0
    diagonal = np.einsum("nii->ni", covariance)
    np.maximum(diagonal, 0.0, out=diagonal)  # rounding may leave a tiny negative variance
    return np.maximum(mean, 0.0), covariance
