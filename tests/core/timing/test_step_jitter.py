"""Jitter of single steps: found for each worker, averaged over the last steps, and what it makes a round count."""

import numpy as np
import pytest

from lightning_hetero.core.timing.step_jitter import summarise_round
from lightning_hetero.core.timing.winsorized_mean import winsorize_top
from tests.core.timing.filters.test_time_posterior import NAMES, THETA, seen, steps


@pytest.mark.parametrize("count", [4, 8, 32])
def test_the_scatter_of_single_steps_is_found(count):
    """Though the longest steps are capped."""
    rng, names = np.random.default_rng(0), tuple(map(str, range(100)))
    theta = np.repeat(THETA[:1], 100, axis=0)
    posterior = seen(*[steps(theta, np.full(100, 20), count, rng, 0.08) for _ in range(8)], names=names)
    assert np.sqrt((posterior.times(names).jitter ** 2).mean()) == pytest.approx(0.08, rel=0.05)


def test_scatter_is_that_of_the_last_steps_and_not_of_one_round():
    rng, sizes = np.random.default_rng(0), (30, 20, 10)
    posterior = seen(*[steps(THETA, sizes, 8, rng, 0.02) for _ in range(60)])
    once = seen(steps(THETA, sizes, 8, rng, np.array([0.02, 0.5, 0.02])), posterior=posterior)
    assert once.times(NAMES).jitter.max() < 0.03
    later = seen(*[steps(THETA, sizes, 8, rng, 0.05) for _ in range(60)], posterior=once)
    assert later.times(NAMES).jitter.min() > 0.042


def test_one_worker_that_scatters_does_not_make_others_uncertain():
    rng, names, noise = np.random.default_rng(0), tuple("abcdef"), np.array([0.02] * 5 + [0.5])
    looks = [steps(np.repeat(THETA[:1], 6, axis=0), np.full(6, 20), 8, rng, noise) for _ in range(6)]
    scatter = seen(*looks, names=names).times(names).jitter
    assert scatter[:5].max() < 0.06 < 0.15 < scatter[5].min()


def test_a_round_that_scatters_more_than_others_counts_less():
    rng = np.random.default_rng(0)
    posterior = seen(*[steps(THETA, (30, 20, 10), 8, rng, 0.02) for _ in range(30)])
    odd = steps(THETA, (30, 20, 10), 8, rng, 0.05)
    _, variance, _ = summarise_round(posterior.jitter, odd.forward, odd.backward, posterior.settings)
    own = np.stack(
        [(winsorize_top(x) / winsorize_top(x).mean(axis=0)).var(axis=0) for x in (odd.forward, odd.backward)], axis=1
    )
    assert (variance >= 0.4 * own / 8).all()
