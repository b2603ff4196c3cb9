"""The estimators of the gradient noise scale against known Gaussian gradients."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.noise.estimators import (
    METHODS,
    NoiseScaleEstimate,
    estimate_from_local_norms,
    estimate_from_two_sizes,
    estimate_noise_scale,
    local_estimates,
)
from lightning_hetero.core.noise.running import RunningNoiseScale

TRIALS = 20_000
DIMENSION = 12
SIGMAS = 4.5  # of the Monte-Carlo error
SPLITS = ((2, 6), (5, 5, 5), (4, 4, 4, 4), (16, 4, 2, 2), (1, 1, 1, 125), (9, 7, 5, 3, 1), (32, 16, 8, 4, 2, 1))
MEAN = np.linspace(-1.0, 1.5, DIMENSION)
VARIANCES = {"isotropic": np.full(DIMENSION, 3.0), "anisotropic": np.geomspace(0.05, 20.0, DIMENSION)}
TRUE_SQ_NORM = float(MEAN @ MEAN)

moderate = settings(max_examples=60, deadline=None, derandomize=True)
every_method = pytest.mark.parametrize("method", METHODS)
every_split = pytest.mark.parametrize("sizes", SPLITS, ids=str)
every_covariance = pytest.mark.parametrize("covariance", VARIANCES)


@cache
def norms(sizes, covariance):
    """``|g_i|^2`` of all workers and ``|g|^2``, shape ``(trials, n + 1)``, of gradients that are Gaussian."""
    rng = np.random.default_rng([11, *sizes])
    b = np.array(sizes, float)
    noise = rng.standard_normal((TRIALS, len(b), DIMENSION)) * np.sqrt(VARIANCES[covariance] / b[:, None])
    local = MEAN + noise
    whole = np.einsum("i,tid->td", b / b.sum(), local)
    return np.column_stack([(local**2).sum(-1), (whole**2).sum(-1)])


@cache
def coefficients(method, sizes):
    """Factors of ``(|g_1|^2, ..., |g|^2)`` in the estimates of ``|G|^2`` and ``tr(Sigma)``, shape ``(2, n + 1)``."""
    columns = []
    for unit in np.eye(len(sizes) + 1):
        estimate = estimate_noise_scale(unit[:-1], unit[-1], sizes, method=method)
        columns.append((estimate.grad_sq_norm, estimate.trace))
    return np.array(columns).T


def estimates(method, sizes, covariance):
    """Estimates of ``|G|^2`` and ``tr(Sigma)`` of all trials, shape ``(2, trials)``."""
    return coefficients(method, sizes) @ norms(sizes, covariance).T


def variance_and_error(values):
    """Empirical variance and its standard error."""
    square = (values - values.mean()) ** 2
    return square.mean(), square.std() / math.sqrt(len(values))


def exact_variance(factors, sizes, covariance):
    """Variance of ``sum_i factors_i |g_i|^2 + factors_n |g|^2`` of Gaussian gradients."""
    b, sigma = np.array(sizes, float), VARIANCES[covariance]
    ratio = b / b.sum()
    form = np.diag(factors[:-1]) + factors[-1] * np.outer(ratio, ratio)
    linear, scale = form.sum(1) / np.sqrt(b), 1 / np.sqrt(b)
    return 2 * (sigma @ sigma) * np.sum((scale[:, None] * form * scale) ** 2) + 4 * (linear @ linear) * (
        MEAN**2 @ sigma
    )


def assert_mean_is(values, expected):
    assert abs(values.mean() - expected) < SIGMAS * values.std() / math.sqrt(len(values))


# unbiased


@every_method
@every_split
@every_covariance
def test_estimates_are_unbiased(method, sizes, covariance):
    grad_sq_norm, trace = estimates(method, sizes, covariance)
    assert_mean_is(grad_sq_norm, TRUE_SQ_NORM)
    assert_mean_is(trace, VARIANCES[covariance].sum())


@every_method
@every_split
def test_estimates_are_linear_with_weights_that_sum_to_one(method, sizes):
    step = norms(sizes, "anisotropic")[0]
    estimate = estimate_noise_scale(step[:-1], step[-1], sizes, method=method)
    assert coefficients(method, sizes) @ step == pytest.approx([estimate.grad_sq_norm, estimate.trace])
    for weights in METHODS[method](np.array(sizes, float)):
        assert weights.sum() == pytest.approx(1.0)


@every_covariance
def test_each_local_estimate_is_unbiased(covariance):
    sizes = (16, 4, 2, 2)
    mean = norms(sizes, covariance).mean(0)  # the estimates are linear: their mean is that of the mean norms
    spread = norms(sizes, covariance).std(0) / math.sqrt(TRIALS)
    grad_sq_norms, traces = local_estimates(mean[:-1], mean[-1], sizes)
    for b, sq_norm, trace in zip(sizes, grad_sq_norms, traces, strict=True):
        error = SIGMAS * 2 * spread.max() * 24 / (24 - b)
        assert sq_norm == pytest.approx(TRUE_SQ_NORM, abs=error)
        assert trace == pytest.approx(VARIANCES[covariance].sum(), abs=error * b)


@every_covariance
def test_two_sizes_are_unbiased(covariance):
    rng = np.random.default_rng(3)
    micro_batches = MEAN + rng.standard_normal((TRIALS, 4, DIMENSION)) * np.sqrt(VARIANCES[covariance] / 8)
    small, big = (micro_batches[:, 0] ** 2).sum(-1), (micro_batches.mean(1) ** 2).sum(-1)
    made = [estimate_from_two_sizes(s, 8, g, 32) for s, g in zip(small.tolist(), big.tolist(), strict=True)]
    assert_mean_is(np.array([e.grad_sq_norm for e in made]), TRUE_SQ_NORM)
    assert_mean_is(np.array([e.trace for e in made]), VARIANCES[covariance].sum())
    assert not made[0].biased


@every_covariance
@pytest.mark.parametrize("sizes", [(2, 6), (16, 4, 2, 2), (9, 7, 5, 3, 1)], ids=str)
def test_local_norms_alone_are_unbiased(sizes, covariance):
    units = [estimate_from_local_norms(unit, sizes) for unit in np.eye(len(sizes))]
    factors = np.array([(e.grad_sq_norm, e.trace) for e in units]).T
    grad_sq_norm, trace = factors @ norms(sizes, covariance)[:, :-1].T
    assert_mean_is(grad_sq_norm, TRUE_SQ_NORM)
    assert_mean_is(trace, VARIANCES[covariance].sum())


def test_local_norms_alone_count_by_the_inverse_of_their_variance():
    """Where noise dominates, ``|g_i|^2`` has a variance in proportion to ``1 / b_i^2``."""
    sizes, local = np.array([16.0, 4.0, 2.0, 2.0]), np.array([2.0, 5.0, 9.0, 6.0])
    slope, intercept = np.polyfit(1 / sizes, local, 1, w=sizes)  # takes roots of weights
    estimate = estimate_from_local_norms(local, sizes)
    assert (estimate.trace, estimate.grad_sq_norm) == pytest.approx((slope, intercept))


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_estimates_follow_the_scale_of_the_loss(scale):
    made = (
        estimate_noise_scale([3.0 * scale, 2.0 * scale], 1.5 * scale, [2, 4]),
        estimate_from_two_sizes(2.0 * scale, 4, 1.5 * scale, 8),
        estimate_from_local_norms([3.0 * scale, 2.0 * scale], [2, 4]),
    )
    plain = (
        estimate_noise_scale([3.0, 2.0], 1.5, [2, 4]),
        estimate_from_two_sizes(2.0, 4, 1.5, 8),
        estimate_from_local_norms([3.0, 2.0], [2, 4]),
    )
    for got, expected in zip(made, plain, strict=True):
        assert got.noise_scale == pytest.approx(expected.noise_scale)


# least variance


@every_split
@every_covariance
def test_pooled_has_the_variance_that_is_stated(sizes, covariance):
    n, total, sigma = len(sizes), sum(sizes), VARIANCES[covariance]
    grad_sq_norm, trace = estimates("pooled", sizes, covariance)
    of_trace = 2 * (sigma @ sigma) / (n - 1)
    of_sq_norm = 4 * (MEAN**2 @ sigma) / total + 2 * (sigma @ sigma) * n / ((n - 1) * total**2)
    for values, expected in ((trace, of_trace), (grad_sq_norm, of_sq_norm)):
        variance, error = variance_and_error(values)
        assert abs(variance - expected) < SIGMAS * error
    factors = coefficients("pooled", sizes)
    assert exact_variance(factors[0], sizes, covariance) == pytest.approx(of_sq_norm)
    assert exact_variance(factors[1], sizes, covariance) == pytest.approx(of_trace)


@pytest.mark.parametrize("method", ["mean", "cannikin"])
@every_split
@every_covariance
def test_no_method_has_less_variance_than_pooled(method, sizes, covariance):
    for best, other in zip(estimates("pooled", sizes, covariance), estimates(method, sizes, covariance), strict=True):
        (least, error), (variance, other_error) = variance_and_error(best), variance_and_error(other)
        assert least <= variance + SIGMAS * math.hypot(error, other_error)
    for best, other in zip(coefficients("pooled", sizes), coefficients(method, sizes), strict=True):
        assert exact_variance(best, sizes, covariance) <= exact_variance(other, sizes, covariance) * (1 + 1e-9)


@moderate
@given(st.sampled_from(SPLITS), st.sampled_from(sorted(VARIANCES)), st.integers(0, 2**16))
def test_no_weights_have_less_variance_than_pooled(sizes, covariance, seed):
    b, n = np.array(sizes, float), len(sizes)
    total = b.sum()
    weights = (total - b) / ((n - 1) * total) + (off := np.random.default_rng(seed).standard_normal(n)) - off.mean()
    trace = np.append(weights * b * total / (total - b), -(weights * b * total / (total - b)).sum())
    sq_norm = -trace / total
    sq_norm[-1] += 1.0
    pooled = coefficients("pooled", sizes)
    assert exact_variance(pooled[0], sizes, covariance) <= exact_variance(sq_norm, sizes, covariance) * (1 + 1e-9)
    assert exact_variance(pooled[1], sizes, covariance) <= exact_variance(trace, sizes, covariance) * (1 + 1e-9)


@every_covariance
def test_local_and_global_norm_covary_by_the_cross_products_too(covariance):
    """``Cov(|g|^2, |g_i|^2)`` is ``4 G' Sigma G / B + ...``; Lemma B.5 has ``b_i / B`` of it."""
    sizes, sigma = (16, 4, 2, 2), VARIANCES[covariance]
    total = sum(sizes)
    values = norms(sizes, covariance)
    centred = values - values.mean(0)
    exact = 4 * (MEAN**2 @ sigma) / total + 2 * (sigma @ sigma) / total**2
    for i, b in enumerate(sizes):
        product = centred[:, i] * centred[:, -1]
        error = SIGMAS * product.std() / math.sqrt(TRIALS)
        printed = exact * b / total
        assert abs(product.mean() - exact) < error
        assert abs(product.mean() - printed) > error


# algebra


@every_split
def test_pooled_is_the_formula(sizes):
    b, total = np.array(sizes), sum(sizes)
    *local, whole = norms(sizes, "anisotropic")[0]
    trace = (b @ local - total * whole) / (len(sizes) - 1)
    estimate = estimate_noise_scale(local, whole, sizes)
    assert estimate.trace == pytest.approx(trace)
    assert estimate.grad_sq_norm == pytest.approx(whole - trace / total)
    assert estimate.noise_scale == pytest.approx(trace / (whole - trace / total))


def printed_weights(sizes):
    """Theorem 4.1 of the paper, entry by entry."""
    n, B = len(sizes), sum(sizes)
    A_G, A_S = np.zeros((n, n)), np.zeros((n, n))
    for i, b_i in enumerate(sizes):
        for j, b_j in enumerate(sizes):
            if i == j:
                A_G[i, i] = (B + 2 * b_i) / (B**2 - B * b_i)
                A_S[i, i] = B * b_i / (B - b_i)
            else:
                A_G[i, j] = (B**2 - b_i**2 - b_j**2) / (B * (B - b_i) * (B - b_j))
                A_S[i, j] = b_i * b_j * (B - b_i - b_j) / ((B - b_i) * (B - b_j))
    one = np.ones(n)
    return [one @ np.linalg.inv(A) / (one @ np.linalg.inv(A) @ one) for A in (A_G, A_S)]


@every_split
def test_cannikin_has_the_printed_weights(sizes):
    *local, whole = norms(sizes, "anisotropic")[0]
    G, S = local_estimates(local, whole, sizes)
    w_G, w_S = printed_weights(sizes)
    estimate = estimate_noise_scale(local, whole, sizes, method="cannikin")
    assert estimate.grad_sq_norm == pytest.approx(w_G @ G)
    assert estimate.trace == pytest.approx(w_S @ S)


@every_split
def test_mean_has_equal_weights(sizes):
    *local, whole = norms(sizes, "anisotropic")[0]
    grad_sq_norms, traces = local_estimates(local, whole, sizes)
    estimate = estimate_noise_scale(local, whole, sizes, method="mean")
    assert estimate.grad_sq_norm == pytest.approx(grad_sq_norms.mean())
    assert estimate.trace == pytest.approx(traces.mean())


def test_printed_weights_can_be_negative():
    assert min(printed_weights((16, 4, 2, 2))[0]) < 0
    assert min(METHODS["pooled"](np.array([16.0, 4, 2, 2]))[0]) > 0


@pytest.mark.parametrize("sizes", [(8, 8), (5, 5, 5), (4, 4, 4, 4)], ids=str)
def test_all_methods_are_one_for_equal_batches(sizes):
    *local, whole = norms(sizes, "anisotropic")[0]
    made = [estimate_noise_scale(local, whole, sizes, method=method) for method in METHODS]
    for estimate in made:
        assert estimate.grad_sq_norm == pytest.approx(made[0].grad_sq_norm)
        assert estimate.trace == pytest.approx(made[0].trace)


@every_method
def test_workers_without_samples_are_left_out(method):
    *local, whole = norms((2, 6), "anisotropic")[0]
    without = estimate_noise_scale(local, whole, (2, 6), method=method)
    assert estimate_noise_scale([local[0], math.nan, local[1]], whole, (2, 0, 6), method=method) == without


@every_method
def test_micro_batches_count_as_workers(method):
    """Four batches give one estimate, be they of 4 workers, of 2 with 2 micro-batches each, or of 1 with 4."""
    sizes = np.array([5, 3, 2, 6])
    samples = MEAN + np.random.default_rng(5).standard_normal((sizes.sum(), DIMENSION))
    batches = np.split(samples, np.cumsum(sizes)[:-1])
    whole = float(samples.mean(0) @ samples.mean(0))

    def of(workers):
        order = [batch for micro_batches in workers for batch in micro_batches]
        means = [batches[i].mean(0) for i in order]
        return estimate_noise_scale([float(g @ g) for g in means], whole, sizes[order], method=method)

    expected = of([[0], [1], [2], [3]])
    for workers in ([[0, 2], [1, 3]], [[0, 1, 2, 3]]):
        got = of(workers)
        assert got.grad_sq_norm == pytest.approx(expected.grad_sq_norm)
        assert got.trace == pytest.approx(expected.trace)


@pytest.mark.parametrize(
    ("trace", "grad_sq_norm", "expected"),
    [(6.0, 3.0, 2.0), (0.0, 1.0, 0.0), (1.0, 0.0, math.inf), (1.0, -2.0, math.inf)],
)
def test_ratio(trace, grad_sq_norm, expected):
    assert NoiseScaleEstimate(grad_sq_norm, trace).noise_scale == expected


@pytest.mark.parametrize(("trace", "grad_sq_norm"), [(math.nan, 1.0), (1.0, math.nan), (0.0, 0.0), (-1.0, -1.0)])
def test_ratio_of_unknowns_is_unknown(trace, grad_sq_norm):
    assert math.isnan(NoiseScaleEstimate(grad_sq_norm, trace).noise_scale)


# errors


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: estimate_noise_scale([1.0], 1.0, [8]), r"1 worker.*at least 2 are needed.*accumulation"),
        (lambda: estimate_noise_scale([1.0, 0.0], 1.0, [8, 0]), r"at least 2 are needed"),
        (lambda: estimate_noise_scale([1.0, 2.0], 1.0, [8]), r"one squared norm and one batch size per worker"),
        (lambda: estimate_noise_scale([[1.0, 2.0]], 1.0, [[8, 8]]), r"got shapes \(1, 2\)"),
        (lambda: estimate_noise_scale([1.0, 2.0], 1.0, [8, -8]), r"must be finite and >= 0"),
        (lambda: estimate_noise_scale([1.0, 2.0], 1.0, [8, math.nan]), r"must be finite and >= 0"),
        (lambda: estimate_noise_scale([1.0, 2.0], 1.0, [8, 8], method="best"), r"allowed are 'pooled', "),
        (lambda: estimate_from_two_sizes(1.0, 8, 1.0, 8), r"must have more samples than small_batch=8"),
        (lambda: estimate_from_two_sizes(1.0, 0, 1.0, 8), r"small_batch=0"),
        (lambda: estimate_from_local_norms([1.0, 1.0, 1.0], [4, 4, 0]), r"equal batches \(4 samples\).*vary the sizes"),
        (lambda: estimate_from_local_norms([1.0], [4]), r"at least 2 are needed"),
        (lambda: RunningNoiseScale(horizon=0), r"horizon=0"),
        (lambda: RunningNoiseScale().update(trace=1, global_sq_norm=1, total_batch_size=0), r"total_batch_size=0"),
    ],
)
def test_errors_say_what_to_do(call, says):
    with pytest.raises(ValueError, match=says):
        call()
