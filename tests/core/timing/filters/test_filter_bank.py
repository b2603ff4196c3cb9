"""Filters side by side: how each is stepped, weighed by what it predicted, and exchanged for another."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.timing.filters.filter_bank import step_filters, switch_filters, weigh_filters
from lightning_hetero.core.timing.filters.kalman import mixed
from lightning_hetero.core.timing.times import EstimatorSettings
from tests.core.timing.filters.test_time_posterior import THETA, plain, seen, steps


def test_filters_that_all_agree_on_are_weighed_by_bayes_rule():
    """Where the prior holds for very many workers, nothing that this round showed is common to all."""
    rng = np.random.default_rng(0)
    weight, likelihood = rng.dirichlet(np.ones(5), 3).T, rng.uniform(-7, 0, (5, 3))
    found = weigh_filters(weight, likelihood, EstimatorSettings(prior_workers=1e9))
    expected = weight * np.exp(likelihood)
    np.testing.assert_allclose(found, expected / expected.sum(axis=0), rtol=1e-6)


@pytest.mark.parametrize("workers", [1, 3, 40])
def test_filters_are_weighed_as_expectation_maximisation_has_it(workers):
    """Against loops: ``p_i = w_i f_i l_i``, ``f`` the ratio of the sums after and before, with workers of the prior."""
    rng, count = np.random.default_rng(workers), EstimatorSettings().prior_workers
    weight, likelihood = rng.dirichlet(np.ones(5), workers).T, rng.uniform(-12, 3, (5, workers))
    factor = [1.0] * 5
    for _ in range(5):
        after = np.zeros((5, workers))
        for n in range(workers):
            best = max(likelihood[:, n])
            parts = [weight[j, n] * factor[j] * np.exp(max(likelihood[j, n] - best, -8.0)) for j in range(5)]
            after[:, n] = np.array(parts) / sum(parts)
        usual = [np.mean(weight[j]) * count for j in range(5)]
        factor = [(sum(after[j]) + usual[j]) / (sum(weight[j]) + usual[j]) for j in range(5)]
    np.testing.assert_allclose(weigh_filters(weight, likelihood, EstimatorSettings()), after, rtol=1e-12)


def test_what_switches_is_the_filter_and_not_what_is_known():
    """A share of each worker's probability goes to what holds for the others; mean and covariance stay."""
    rng = np.random.default_rng(4)
    posterior = seen(*[steps(THETA, sizes, 8, rng, 0.05) for sizes in ((16, 16, 16), (48, 24, 8)) * 4])
    weight = rng.dirichlet(np.ones(5), 3).T
    mean, covariance, after = switch_filters(posterior.mean, posterior.covariance, weight, posterior.settings)
    prior, share = np.array(posterior.settings.prior), posterior.settings.switch
    others = (weight.sum(axis=1) + 8 * prior / prior.sum()) / (3 + 8)
    np.testing.assert_allclose(after, (1 - share) * weight + share * others[:, None])
    before = mixed(weight, posterior.mean, posterior.covariance)
    for found, expected in zip(mixed(after, mean, covariance), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_round_that_says_nothing_speaks_for_nothing():
    """Neither against a filter whose coefficients are below zero already, nor for a jump."""
    chosen, y = replace(plain(), jump_probability=0.01), np.array([[0.3, 0.6]])
    mean = np.array([[[0.03, -0.06, 0.06, 0.0]], [[0.03, 0.06, 0.06, 0.0]]])
    covariance = np.broadcast_to(np.diag([1e-3, 0.015, 2e-3, 0.02]) ** 2, (2, 1, 4, 4)).copy()
    vague, rounds = np.full((1, 2), 1e4), np.zeros((2, 1))
    after, _, level, jump = step_filters(mean, covariance, np.array([10.0]), y, vague, rounds, 0.0, chosen)
    np.testing.assert_allclose(after, mean, atol=1e-4)
    scale = np.clip(mean[..., 0] * 10 + mean[..., 1], 0.15, 0.6) * 0.6
    np.testing.assert_allclose(level, -np.log(1e4 * scale), atol=0.02)
    assert jump[:, 0] == pytest.approx([0.01, 0.0], rel=0.02)
