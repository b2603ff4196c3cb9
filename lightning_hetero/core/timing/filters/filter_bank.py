"""Bank of Kalman filters that follow the speeds of all workers, each with its own assumptions on noise and walk.

Each filter has its own ``rho``, the noise common to all steps of a round, and ``omega``, the walk of speeds. Filters
are weighted for each worker by how well they predict it. Between rounds another filter may become the right one
(interacting multiple models; Blom and Bar-Shalom, 1988), and a speed may jump. Arrays have the shape ``(filters,
workers, ...)``.
"""

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.filters.kalman import gain_of, mixed, possible, surprise, update
from lightning_hetero.core.timing.times import WALK_STEPS, EstimatorSettings

__all__ = ["first_state", "step_filters", "switch_filters", "usual_weight", "weigh_filters"]

Array = npt.NDArray[np.float64]

MIN_PROBABILITY = 1e-100
"""Least probability of a filter: practically 0, but safe to divide by."""


def first_state(b: Array, y: Array, variance: Array, rounds: Array, settings: EstimatorSettings) -> tuple[Array, Array]:
    """Return the state of workers seen for the first time: time in proportion to size, with an uncertain fixed share.

    Args:
        b: samples of each worker.
        y: its mean times outside of and in backward, shape ``(workers, 2)``.
        variance: variance of these times, relative to their squares.
        rounds: relative standard deviation of the noise common to a round's steps, shape ``(filters, workers)``.
        settings: of the estimator.

    Returns:
        Mean and covariance of each filter.

    Example:
        >>> b, y, none = np.array([10.0]), np.array([[0.1, 0.2]]), np.zeros((1, 2))
        >>> first_state(b, y, none, np.zeros((5, 1)), EstimatorSettings())[0][0].tolist()
        [[0.01, 0.0, 0.02, 0.0]]
    """
    count, filters = len(b), len(settings.walks)
    mean = np.zeros((filters, count, 4))
    mean[:, :, 0], mean[:, :, 2] = y[:, 0] / b, y[:, 1] / b
    covariance = np.zeros((filters, count, 4, 4))
    rounds = rounds**2
    fixed = settings.fixed_share**2
    for phase in (0, 1):
        i, t2 = 2 * phase, y[:, phase] ** 2
        covariance[:, :, i, i] = t2 * (fixed + variance[:, phase] + rounds) / b**2
        covariance[:, :, i + 1, i + 1] = t2 * fixed
        covariance[:, :, i, i + 1] = covariance[:, :, i + 1, i] = -t2 * fixed / b
    common = rounds * (y[:, 0] * y[:, 1] / b**2)
    covariance[:, :, 0, 2] += common
    covariance[:, :, 2, 0] += common
    return mean, covariance


def step_filters(
    mean: Array,
    covariance: Array,
    b: Array,
    y: Array,
    variance: Array,
    rounds: Array,
    elapsed: float,
    settings: EstimatorSettings,
) -> tuple[Array, Array, Array, Array]:
    """Return each filter after a round: mean, covariance, log likelihood, and probability of a jump before it.

    Args:
        mean: ``theta`` of each filter and worker before the round.
        covariance: covariance of ``theta``.
        b: samples of each worker.
        y: its mean times outside of and in backward, shape ``(workers, 2)``.
        variance: variance of these times, relative to their squares.
        rounds: relative standard deviation of the noise common to a round's steps, shape ``(filters, workers)``.
        elapsed: steps since the round before.
        settings: of the estimator.

    Example:
        >>> b, y, settings = np.array([10.0]), np.array([[0.1, 0.2]]), EstimatorSettings()
        >>> state = first_state(b, y, np.zeros((1, 2)), np.zeros((5, 1)), settings)
        >>> mean, *_ = step_filters(*state, 2 * b, 2 * y, np.full((1, 2), 1e-6), np.zeros((5, 1)), 8.0, settings)
        >>> (mean[:, 0] @ [20, 1, 20, 1]).round(6).tolist()
        [0.6, 0.6, 0.6, 0.6, 0.6]
    """
    walks = np.array(settings.walks)[:, None]
    theta = np.maximum(mean, 0.0)
    spread = (walks**2 * (elapsed / WALK_STEPS))[..., None, None]
    covariance = covariance + spread * (theta[..., :, None] * theta[..., None, :])
    diagonal = np.einsum("fnii->fni", covariance)
    size = np.stack([y[:, 0] / b, y[:, 0], y[:, 1] / b, y[:, 1]], axis=1)  # of each coefficient if it were the only one
    diagonal += (settings.shape_walk * walks[..., None] * size) ** 2 * (elapsed / WALK_STEPS)
    gain = gain_of(covariance, b)  # P H^T, (filters, workers, 4, 2)
    expected = np.stack([mean[..., 0] * b + mean[..., 1], mean[..., 2] * b + mean[..., 3]], axis=-1)
    # noise grows with the expected time, but a filter that is far off must not gain by its own larger noise
    scale = np.clip(expected, y / 2.0, y * 2.0)
    noise = rounds[..., None, None] ** 2 * scale[..., :, None] * scale[..., None, :]
    noise[..., 0, 0] += variance[:, 0] * scale[..., 0] ** 2
    noise[..., 1, 1] += variance[:, 1] * scale[..., 1] ** 2
    off = y - expected
    stayed = update(mean, covariance, gain, noise, off, b)
    level = stayed[2] + possible(stayed[0], stayed[1]) - possible(mean, covariance)
    odd = surprise(gain, noise, off, b) - 2.0 * possible(stayed[0], stayed[1]) > settings.gate
    chance, jump = settings.jump_probability, np.zeros(odd.shape)
    if not odd.any():
        return stayed[0], stayed[1], level + np.log1p(-chance), jump
    at = np.nonzero(odd)
    b_at, theta_at = b[at[1]], np.maximum(theta[at], 1e-3 * size[at[1]])
    wide = covariance[at] + settings.jump**2 * theta_at[:, :, None] * theta_at[:, None, :]
    np.einsum("nii->ni", wide)[...] += (settings.reshape * size[at[1]]) ** 2
    jumped = update(mean[at], wide, gain_of(wide, b_at), noise[at], off[at], b_at)
    jumps = jumped[2] + possible(jumped[0], jumped[1]) - possible(mean[at], wide)
    logs = np.stack([level[at] + np.log1p(-chance), jumps + np.log(chance)])
    top = logs.max(axis=0)
    weight = np.exp(logs - top)
    level = level + np.log1p(-chance)
    level[at] = top + np.log(weight.sum(axis=0))
    weight /= weight.sum(axis=0)
    means, covariances = np.stack([stayed[0][at], jumped[0]]), np.stack([stayed[1][at], jumped[1]])
    stayed[0][at], stayed[1][at] = mixed(weight, means, covariances)
    jump[at] = weight[1]
    return stayed[0], stayed[1], level, jump


def weigh_filters(weight: Array, likelihood: Array, settings: EstimatorSettings) -> Array:
    """Return the probability of each filter after a round, by how well it predicted each worker and all of them.

    Rounds vary and speeds walk for reasons that workers often share (a machine, a data center, a kind of device). So a
    filter that predicted most workers well counts more for each of them: one factor per filter, common to all workers,
    is fitted to the round by expectation maximization.

    Args:
        weight: probabilities before the round, shape ``(filters, workers)``.
        likelihood: logarithm of the likelihood of the round, same shape.
        settings: of the estimator.

    Example:
        >>> even = np.full((2, 1), 0.5)
        >>> weigh_filters(even, np.array([[0.0], [-3.0]]), EstimatorSettings(prior_workers=1e9)).round(2).tolist()
        [[0.95], [0.05]]
    """
    # the floor: no single round, however odd, rules a filter out for good
    likely, count = np.exp(np.maximum(likelihood - likelihood.max(axis=0), -8.0)), settings.prior_workers
    before = weight.sum(axis=1) + count * weight.mean(axis=1)
    factor = np.ones(len(weight))
    for _ in range(5):
        after = weight * factor[:, None] * likely
        after /= after.sum(axis=0)
        factor = (after.sum(axis=1) + count * weight.mean(axis=1)) / before
    return np.asarray(np.maximum(after, MIN_PROBABILITY))


def usual_weight(weight: Array, settings: EstimatorSettings) -> Array:
    """Return the prior probability of each filter for a worker, from the settings and the other workers.

    Args:
        weight: of each filter and worker, shape ``(filters, workers)``.
        settings: of the estimator.

    Example:
        >>> usual_weight(np.zeros((5, 0)), EstimatorSettings()).round(2).tolist()
        [0.6, 0.12, 0.03, 0.15, 0.1]
    """
    prior, count = np.maximum(settings.prior, MIN_PROBABILITY), max(settings.prior_workers, 1e-9)
    return np.asarray((weight.sum(axis=1) + count * prior / prior.sum()) / (weight.shape[1] + count))


def switch_filters(
    mean: Array, covariance: Array, weight: Array, settings: EstimatorSettings
) -> tuple[Array, Array, Array]:
    """Return the filters before another round: each may become the right one for a worker that others have followed.

    It then continues from the mixture of all filters.

    Args:
        mean: ``theta`` of each filter and worker.
        covariance: covariance of ``theta``.
        weight: probability of each filter for each worker.
        settings: of the estimator; ``switch`` and the prior are used.

    Returns:
        Mean, covariance and weight.

    Example:
        >>> mean, covariance, weight = np.zeros((5, 1, 4)), np.zeros((5, 1, 4, 4)), np.eye(5)[:, :1]
        >>> switch_filters(mean, covariance, weight, EstimatorSettings(switch=0.5))[2][:, 0].round(2).tolist()
        [0.82, 0.05, 0.01, 0.07, 0.04]
    """
    arrives = settings.switch * usual_weight(weight, settings)[:, None]
    stays = (1.0 - settings.switch) * weight
    after = stays + arrives
    own, other = stays / after, arrives / after
    all_mean, all_covariance = mixed(weight, mean, covariance)
    middle = own[..., None] * mean + other[..., None] * all_mean
    x, z = mean - middle, all_mean - middle
    inner = own[..., None, None] * (covariance + x[..., :, None] * x[..., None, :])
    inner += other[..., None, None] * (all_covariance + z[..., :, None] * z[..., None, :])
    return middle, inner, after
