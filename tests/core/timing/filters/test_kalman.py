"""Kalman filters of many workers at once, against whole matrices."""

import numpy as np
import pytest

from lightning_hetero.core.timing.filters.kalman import gain_of, non_negative, surprise, update


def covariances(rng, count):
    root = rng.normal(size=(count, 4, 4)) * 10.0 ** rng.uniform(-2, 0, (count, 4, 1))
    return root @ root.swapaxes(1, 2)


@pytest.mark.parametrize("seed", range(10))
def test_many_workers_at_once_are_each_updated_as_by_whole_matrices(seed):
    rng = np.random.default_rng(seed)
    mean, covariance, b = rng.normal(size=(20, 4)), covariances(rng, 20), rng.uniform(1, 100, 20)
    noise, off = covariances(rng, 20)[:, :2, :2] + 1e-6 * np.eye(2), rng.normal(size=(20, 2))
    gain = gain_of(covariance, b)
    after = update(mean, covariance, gain, noise, off, b)
    odd = surprise(gain, noise, off, b)
    for i in range(20):
        h = np.array([[b[i], 1, 0, 0], [0, 0, b[i], 1]])
        inner = h @ covariance[i] @ h.T + noise[i]
        weight = covariance[i] @ h.T @ np.linalg.inv(inner)
        squared = off[i] @ np.linalg.solve(inner, off[i])
        assert odd[i] == pytest.approx(squared)
        np.testing.assert_allclose(after[0][i], mean[i] + weight @ off[i], atol=1e-9)
        np.testing.assert_allclose(after[1][i], covariance[i] - weight @ h @ covariance[i], atol=1e-9)
        assert after[2][i] == pytest.approx(-0.5 * (squared + np.log(np.linalg.det(inner))))


def test_what_is_known_given_that_some_coefficients_are_zero_is_so_for_all_of_them_together():
    """Also where one that is taken to be zero makes another one negative, whatever the order."""
    rng = np.random.default_rng(0)
    means, before = rng.normal(size=(4000, 4)), covariances(rng, 4000)
    found, after = non_negative(means, before)
    assert (found >= 0).all()
    for mean, covariance, x, inner in zip(means, before, found, after, strict=True):
        zero = x == 0.0
        weight = covariance[:, zero] @ np.linalg.inv(covariance[np.ix_(zero, zero)])
        scale = np.sqrt(np.diagonal(covariance))
        np.testing.assert_allclose((x - (mean - weight @ mean[zero])) / scale, 0.0, atol=1e-6)
        np.testing.assert_allclose(
            (inner - (covariance - weight @ covariance[zero])) / np.outer(scale, scale), 0.0, atol=1e-6
        )
