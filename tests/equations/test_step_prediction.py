"""Predicted steps: the largest of uncertain times, their standard errors, and what was measured beyond them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.timing.expected_maximum import expected_maximum, larger_error
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.prediction import StepPrediction
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.core.timing.times import EstimatorSettings, Times

seeds = st.integers(0, 2**32 - 1)


def normal_cdf(z):
    return np.vectorize(lambda x: 0.5 * math.erfc(-x / 2**0.5))(z)


def by_fine_quadrature(mean, deviation):
    """Mean and deviation of the largest of independent normal values."""
    low, high = (mean - 8 * deviation).max(), (mean + 8 * deviation).max()
    around = (mean[:, None] + deviation[:, None] * np.linspace(-8, 8, 201)).ravel()
    x = np.unique(np.concatenate([np.linspace(low, high, 501), around]))
    x = x[(x >= low) & (x <= high)]
    kinds, number = np.unique(np.stack([mean, deviation]), axis=1, return_counts=True)
    above = 1 - (normal_cdf((x[:, None] - kinds[0]) / kinds[1]) ** number).prod(axis=1)
    first = np.trapezoid(above, x)
    second = 2 * np.trapezoid(above * (x - low), x)
    return low + first, math.sqrt(max(second - first**2, 0.0))


@given(seeds, st.booleans())
def test_the_largest_of_uncertain_values_is_that_of_a_fine_quadrature(seed, alike):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    mean = 1 + rng.uniform(0, 1) * rng.random(n)
    deviation = rng.uniform(0.001, 0.2, n) if alike else 10.0 ** rng.uniform(-4, -0.5, n)
    expected, spread = by_fine_quadrature(mean, deviation)
    assert expected_maximum(mean, deviation) == pytest.approx((expected, spread), abs=0.006 * deviation.max())


def test_many_values_are_counted_together(seed):
    """Of three kinds, slightly different from each other: as if each were counted by itself."""
    rng = np.random.default_rng(seed)
    n, kinds = int(rng.integers(501, 4000)), rng.integers(0, 3, 4000)
    mean, deviation = np.array([1.0, 1.02, 1.1])[kinds[:n]], np.array([0.03, 0.02, 0.01])[kinds[:n]]
    expected, spread = by_fine_quadrature(mean, deviation)
    off = rng.uniform(0.999, 1.001, n)
    found = expected_maximum(mean * off + 0.001 * (1 - off), deviation * off)
    assert found == pytest.approx((expected, spread), abs=0.03 * 0.03)


@pytest.mark.parametrize(
    ("mean", "deviation", "expected", "spread"),
    [
        ([5.0], [2.0], 5.0, 2.0),
        ([5.0] * 2, [2.0] * 2, 5.0 + 2 / math.pi**0.5, 2 * (1 - 1 / math.pi) ** 0.5),
        ([1.0, 3.0, 2.0], [0.0] * 3, 3.0, 0.0),
        ([1.0, 0.5, 0.4], [0.0, 0.01, 0.005], 1.0, 0.0),
        ([1.0, 0.5, 0.4], [0.0, 1e-15, 1e-15], 1.0, 0.0),
        ([1.0, 0.5, 0.4], [1e-14, 0.01, 0.005], 1.0, 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
    ],
)
def test_the_largest_where_it_is_known_exactly(mean, deviation, expected, spread):
    found = expected_maximum(np.array(mean), np.array(deviation))
    assert found == pytest.approx((expected, spread), abs=0.004 * max(deviation))


def test_the_larger_of_two_has_the_error_of_drawn_values(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, 8))
    x_error, y_error = rng.uniform(0.05, 1.0, (2, 8))
    shared, own = rng.standard_normal((2, 40_000, 8))
    correlation = rng.uniform(-1.0, 1.0, 8)
    correlation[0], y_error[1], y[1] = 1.0, 0.0, x[1]
    drawn = y + y_error * (correlation * shared + np.sqrt(1.0 - correlation**2) * own)
    drawn = np.maximum(x + x_error * shared, drawn)
    found = larger_error(x, x_error, y, y_error, correlation * x_error * y_error)
    np.testing.assert_allclose(found, drawn.std(axis=0), rtol=0.03, atol=1e-4)


MEAN = np.array([[0.001, 0.01, 0.002, 0.02], [0.003, 0.0, 0.004, 0.01], [0.002, 0.004, 0.001, 0.03]])


def drawn_times(rng, jitter=0.1, share=0.03):
    """Time models of three workers with a covariance, and coefficients that are drawn from it."""
    root = share * MEAN[:, :, None] * rng.standard_normal((3, 4, 4))
    covariance = root @ root.swapaxes(1, 2)
    draws = [rng.multivariate_normal(*one, 40_000) for one in zip(MEAN, covariance, strict=True)]
    return Times(MEAN, covariance, jitter * np.ones((3, 2)), np.ones(1), np.ones(1)), np.array(draws)


SIZES = np.array([40.0, 10.0, 25.0])


def test_times_and_their_errors_are_those_of_drawn_coefficients(seed):
    rng = np.random.default_rng(seed)
    times, draws = drawn_times(rng)
    a, p = draws[:, :, 0] * SIZES[:, None] + draws[:, :, 1], draws[:, :, 2] * SIZES[:, None] + draws[:, :, 3]
    found, errors = times.seconds(SIZES, backward=0.3, outside=2.0)
    np.testing.assert_allclose(found, 2.0 * times.parts(SIZES)[0] + 0.3 * times.parts(SIZES)[1])
    np.testing.assert_allclose(errors, (2.0 * a + 0.3 * p).std(axis=1), rtol=0.03)
    jitter = np.array([[0.3, 0.1], [0.02, 0.2], [0.1, 0.1]])
    jittery = Times(MEAN, times.covariance, jitter, np.ones(1), np.ones(1))
    step = sum(
        part * (1 + j * rng.standard_normal((40_000, 3))) for part, j in zip(times.parts(SIZES), jitter.T, strict=True)
    )
    np.testing.assert_allclose(jittery.single_steps(SIZES), step.std(axis=0) / step.mean(axis=0), rtol=0.03)


def predicted(times, gamma=0.3, t_o=0.05, t_u=0.01, residual=None, accumulation=1, link_variance=0.0, **settings):
    link = {"gamma": [gamma, 0.0], "sync": {3: [[t_o, link_variance], [t_u, link_variance]]}}
    residual = Residual(covariance=(0.0, 0.0, 0.0)) if residual is None else residual
    chosen = EstimatorSettings(**settings)
    return StepPrediction(times, LinkTimes.from_state_dict(link), residual, (1, 1, 1), accumulation, chosen)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("gamma", [0.2, 0.95])
def test_a_finish_is_that_of_drawn_coefficients_and_single_steps(gamma, accumulation, seed):
    """Computing and sending of one worker are late together: with one bucket they are almost the same time."""
    rng, n = np.random.default_rng(seed), accumulation
    times, draws = drawn_times(rng)
    found = predicted(times, gamma, accumulation=n)
    finish, errors, jitter = found.finish(SIZES)
    nodes = [NodeTimeModel(*row) for row in MEAN]
    whole = ClusterTimeModel(nodes, gamma, 0.05, 0.01).accumulated(n)
    np.testing.assert_allclose(finish, whole.finish_times(SIZES))
    assert found.bare == whole
    q, s, k, m = np.moveaxis(draws, 2, 0)
    a, p = q * SIZES[:, None] + s, k * SIZES[:, None] + m
    drawn = np.maximum(n * a + n * p, n * a + (n - 1 + gamma) * p + 0.05) + 0.01
    np.testing.assert_allclose(errors, drawn.std(axis=1), rtol=0.03)
    a, p = (part[:, None, None] for part in times.parts(SIZES))  # an observed time is the mean over n micro-batches
    single = 1 + 0.1 * math.sqrt(n) * rng.standard_normal((2, 3, 10_000, n))
    a, p = a * single[0], p * single[1]
    compute, sent = (a + p).sum(axis=2), a.sum(axis=2) + p[:, :, :-1].sum(axis=2) + gamma * p[:, :, -1]
    computes = compute.mean(axis=1) > sent.mean(axis=1) + 0.05
    np.testing.assert_allclose(jitter, np.where(computes, compute.std(axis=1), sent.std(axis=1)), rtol=0.05)


def test_a_step_waits_for_whoever_is_slowest_in_it_and_its_error_has_every_part(seed):
    rng = np.random.default_rng(seed)
    times, _ = drawn_times(rng, jitter=0.15)
    known = Residual(0.03, 0.02, (1e-4, 0.0, 1e-4))
    found = predicted(times, residual=known, link_variance=0.01, waiting_error=0.3)
    finish, errors, jitter = found.finish(SIZES)
    drawn = (finish + jitter * rng.standard_normal((40_000, 3))).max(axis=1)
    factor = found.waiting_factor(SIZES)
    assert factor == pytest.approx(drawn.mean() / finish.max(), rel=0.003)
    step = found.bare.step_time(SIZES)
    assert found.model(SIZES).step_time(SIZES) == pytest.approx(1.03 * factor * step + 0.02)
    slowest = (finish + errors * rng.standard_normal((40_000, 3))).max(axis=1)
    link = 0.1 * math.hypot(0.05, 0.01)
    parts = factor * slowest.std(), math.sqrt(1e-4 * (factor * slowest.mean()) ** 2 + 1e-4), link
    waits = 0.3 * (factor - 1) * slowest.mean()
    assert found.error(SIZES) == pytest.approx(math.hypot(*parts, waits), rel=0.02)
    assert predicted(times, gamma=-0.5).gamma == 0.0 < 1.0 == predicted(times, gamma=1.5).gamma
    few = predicted(times)
    assert few.waiting_factor([0, 30, 30]) == few.waiting_factor([1, 30, 30]), "it runs its least number of samples"


@pytest.mark.parametrize(("seconds", "share"), [(-0.05, 0.0), (-9.0, 0.0), (0.0, -0.9)])
def test_steps_that_are_shorter_than_predicted_leave_no_time_below_half(seconds, share):
    times, _ = drawn_times(np.random.default_rng(0), jitter=0.0)
    found = predicted(times, residual=Residual(share, seconds, (0.0, 0.0, 0.0)))
    bare = found.bare.step_time(SIZES)
    expected = max(bare * found.waiting_factor(SIZES) * (1 + share) + seconds, 0.5 * bare)
    assert found.model(SIZES).step_time(SIZES) == pytest.approx(expected)


def test_what_a_split_saves_and_may_lose_is_that_of_drawn_times(seed):
    """Errors are those at the running sizes: times at new sizes will be measured by their first steps."""
    rng = np.random.default_rng(seed)
    times, _ = drawn_times(rng, share=0.1)
    found, other = predicted(times), np.array([60, 5, 10])
    model, (finish, errors, _) = found.model(SIZES), found.finish(SIZES)
    factors = 1.0 + errors / finish * rng.standard_normal((100_000, 3))
    here, there = ((model.finish_times(sizes) * factors).max(axis=1) for sizes in (SIZES, other))
    slowest = model.finish_times(other).max()
    expected = 1 - there.mean() / here.mean(), 1 - slowest / (there.mean() + there.std())
    assert found.saving(model, other, SIZES) == pytest.approx(expected, abs=0.006)
    assert found.saving(model, SIZES, SIZES)[0] == 0.0


# measured beyond predicted: a Kalman filter of a share and of seconds


OTHER = EstimatorSettings(residual_prior=0.1, residual_rounds=0.02, residual_walk=0.01, residual_shortfall=0.5)


@given(seeds, st.sampled_from([EstimatorSettings(), OTHER]))
def test_the_residual_is_a_kalman_filter_of_a_share_and_of_seconds(seed, chosen):
    rng, residual = np.random.default_rng(seed), Residual()
    state, covariance = np.zeros(2), None
    assert residual.error(2.0, chosen) == pytest.approx(2.0 * chosen.residual_prior)
    for _ in range(12):
        step, variance = rng.uniform(0.05, 0.3), 10 ** rng.uniform(-6, -2)
        measured = step * rng.uniform(0.4, 1.3)
        residual = residual.observe(step, measured, variance, chosen)
        if measured >= (1 - chosen.residual_shortfall) * step:  # else it was no step
            scale = np.diag([1.0, step**2])
            before = (
                chosen.residual_prior**2 * scale if covariance is None else covariance + chosen.residual_walk**2 * scale
            )
            row, noise = np.array([step, 1.0]), (variance + chosen.residual_rounds**2) * measured**2
            gain = before @ row / (row @ before @ row + noise)
            state = state + gain * (measured - step - row @ state)
            covariance = before - np.outer(gain, row @ before)
        if covariance is not None:
            assert (residual.share, residual.seconds) == pytest.approx(tuple(state))
            for at in (0.1, 0.4):
                error = math.sqrt(np.array([at, 1.0]) @ covariance @ [at, 1.0])
                assert residual.error(at, chosen) == pytest.approx(error)
    assert Residual.from_state_dict(json.loads(json.dumps(residual.state_dict()))) == residual
