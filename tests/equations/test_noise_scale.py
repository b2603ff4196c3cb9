"""Gradient noise scale from unequal batches (C eq. 10-11, corrected), over windows of micro-batches, and its average.

Estimates are linear in squared norms, so that their means and variances under Gaussian gradients are exact sums.
"""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.metrics import noise_metrics
from lightning_hetero.core.noise.accumulation import window_estimator
from lightning_hetero.core.noise.estimators import (
    METHODS,
    NoiseScaleEstimate,
    estimate_from_local_norms,
    estimate_from_two_sizes,
    estimate_noise_scale,
    local_estimates,
)
from lightning_hetero.core.noise.running import RunningNoiseScale

seeds = st.integers(0, 2**32 - 1)
batches = st.lists(st.integers(1, 200), min_size=2, max_size=6)


def coefficients(estimate, count):
    """Factors of the norms in ``|G|^2`` and ``tr(Sigma)``, shape ``(2, count)``."""
    made = [estimate(unit) for unit in np.eye(count)]
    return np.array([(one.grad_sq_norm, one.trace) for one in made]).T


def of_step(sizes, method="pooled"):
    return coefficients(lambda u: estimate_noise_scale(u[:-1], u[-1], sizes, method=method), len(sizes) + 1)


def mean(factors, rows, b):
    """``(of |G|^2, of tr(Sigma))`` in ``E sum_k factors_k |sum_j rows_kj g_j|^2``."""
    return factors @ np.sum(rows, axis=1) ** 2, factors @ (np.square(rows) @ (1 / b))


def variance(factors, rows, b, signal=1.3, noise=2.0):
    """Variance of ``sum_k factors_k |sum_j rows_kj g_j|^2``; of ``G' Sigma G`` and ``tr(Sigma^2)``."""
    form = np.einsum("k,ki,kj->ij", factors, rows, rows)
    return 2 * noise * (form**2 / np.outer(b, b)).sum() + 4 * signal * (form.sum(axis=1) ** 2 / b).sum()


def rows_of(b):
    return np.vstack([np.eye(len(b)), b / b.sum()])


# one step


@given(batches, st.sampled_from(sorted(METHODS)), seeds)
def test_estimates_of_a_step_are_unbiased_and_pooled_ones_have_the_least_variance(sizes, method, seed):
    b, rng = np.array(sizes, float), np.random.default_rng(seed)
    n, total, rows = len(b), b.sum(), rows_of(b)
    signal, trace = of_step(sizes, method)
    assert mean(signal, rows, b) == pytest.approx((1, 0), abs=1e-6)
    assert mean(trace, rows, b) == pytest.approx((0, 1), abs=1e-6)
    best_signal, best_trace = of_step(sizes)
    assert variance(best_trace, rows, b) == pytest.approx(2 * 2.0 / (n - 1)), "2 tr(Sigma^2) / (n - 1)"
    stated = 4 * 1.3 / total + 2 * 2.0 * n / ((n - 1) * total**2)
    assert variance(best_signal, rows, b) == pytest.approx(stated)
    off = rng.standard_normal(n)
    weights = (total - b) / ((n - 1) * total) + off - off.mean()
    other = np.append(weights * b * total / (total - b), -(weights * b * total / (total - b)).sum())
    for found, best in ((signal, best_signal), (trace, best_trace), (other, best_trace)):
        assert variance(best, rows, b) <= variance(found, rows, b) * (1 + 1e-9)


def printed_weights(b):
    """Theorem 4.1 of the paper, entry by entry."""
    n, B = len(b), sum(b)
    A_G, A_S = np.zeros((n, n)), np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i == j:
                A_G[i, i], A_S[i, i] = (B + 2 * b[i]) / (B**2 - B * b[i]), B * b[i] / (B - b[i])
            else:
                A_G[i, j] = (B**2 - b[i] ** 2 - b[j] ** 2) / (B * (B - b[i]) * (B - b[j]))
                A_S[i, j] = b[i] * b[j] * (B - b[i] - b[j]) / ((B - b[i]) * (B - b[j]))
    return [np.ones(n) @ np.linalg.pinv(A) / (np.ones(n) @ np.linalg.pinv(A) @ np.ones(n)) for A in (A_G, A_S)]


WEIGHTS = {
    "pooled": lambda b: [(sum(b) - b) / ((len(b) - 1) * sum(b))] * 2,
    "mean": lambda b: [np.full(len(b), 1 / len(b))] * 2,
    "cannikin": printed_weights,
}


@given(batches, seeds, st.sampled_from(sorted(METHODS)))
def test_a_step_is_the_weighted_mean_of_equation_10(sizes, seed, method):
    rng, b, B = np.random.default_rng(seed), np.array(sizes, float), sum(sizes)
    *local, whole = rng.uniform(0.1, 5.0, len(sizes) + 1)
    G = [(B * whole - b_i * g_i) / (B - b_i) for b_i, g_i in zip(b, local, strict=True)]
    S = [b_i * B / (B - b_i) * (g_i - whole) for b_i, g_i in zip(b, local, strict=True)]
    np.testing.assert_allclose(local_estimates(local, whole, sizes), (G, S))
    w_G, w_S = WEIGHTS[method](b)
    found = estimate_noise_scale(local, whole, sizes, method=method)
    scale = np.abs(w_G) @ np.abs(G), np.abs(w_S) @ np.abs(S)
    assert found.grad_sq_norm == pytest.approx(w_G @ G, abs=1e-6 * scale[0])
    assert found.trace == pytest.approx(w_S @ S, abs=1e-6 * scale[1])
    if method == "pooled":
        trace = (b @ local - B * whole) / (len(b) - 1)
        assert (found.trace, found.grad_sq_norm) == pytest.approx((trace, whole - trace / B))
    where = int(rng.integers(0, len(sizes) + 1))
    without = estimate_noise_scale(np.insert(local, where, math.nan), whole, np.insert(b, where, 0), method=method)
    assert without == found, "workers without samples are left out"
    assert METHODS.keys() == WEIGHTS.keys(), "the weights of a new method, please"


@given(batches, st.integers(1, 100), st.integers(1, 100))
def test_two_sizes_and_local_norms_alone_are_unbiased(sizes, small, more):
    found = coefficients(lambda u: estimate_from_two_sizes(u[0], small, u[1], small + more), 2)
    big = np.array([1 / small + 0, 1 / (small + more)])
    for factors, expected in zip(found, ((1, 0), (0, 1)), strict=True):
        assert (factors.sum(), factors @ big) == pytest.approx(expected, abs=1e-6)
    b = np.array([*sizes, max(sizes) + 1], float)
    signal, trace = coefficients(lambda u: estimate_from_local_norms(u, b), len(b))
    assert mean(signal, np.eye(len(b)), b) == pytest.approx((1, 0), abs=1e-6)
    assert mean(trace, np.eye(len(b)), b) == pytest.approx((0, 1), abs=1e-6)
    local = np.linspace(2.0, 5.0, len(b)) ** 2
    slope, intercept = np.polyfit(1 / b, local, 1, w=b)  # it takes roots of weights
    assert (trace @ local, signal @ local) == pytest.approx((slope, intercept), rel=1e-5, abs=1e-5)


def test_the_ratio_of_what_is_not_known_is_not_known():
    cases = {(6, 3): 2, (0, 1): 0, (1, 0): math.inf, (1, -2): math.inf, (0, 0): math.nan, (1, math.nan): math.nan}
    found = {case: NoiseScaleEstimate(case[1], case[0]).noise_scale for case in cases}
    assert found == pytest.approx(cases, nan_ok=True)
    biased = estimate_from_two_sizes(2.0, 4, 1.5, 8, biased=True)
    assert biased == NoiseScaleEstimate(1.0, 4.0, True) != estimate_from_two_sizes(2.0, 4, 1.5, 8)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: estimate_noise_scale([1.0, 0.0], 1.0, [8, 0]), "worker"),
        (lambda: estimate_noise_scale([1.0, 2.0], 1.0, [8, 8], method="best"), "method"),
        (lambda: estimate_from_two_sizes(1.0, 8, 1.0, 8), "big_batch"),
        (lambda: estimate_from_local_norms([1.0, 1.0, 1.0], [4, 4, 0]), "equal batches"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# windows of micro-batches


windows = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=1, max_size=4).filter(
        lambda rows: all(map(sum, rows))
    )
)
hows = st.fixed_dictionaries(
    {"divisor": st.sampled_from([None, 5]), "summed": st.booleans(), "nested": st.booleans(), "exact": st.booleans()}
)


@given(windows, hows, st.floats(0.1, 1e3), seeds)
def test_estimates_over_a_window_are_unbiased_from_whatever_part_of_the_norms_a_rank_knows(sizes, how, phi, seed):
    """How kinds of estimates are weighted: tests/decisions/test_noise_scale.py."""
    b = np.array(sizes, float)
    count, ranks = b.shape
    found = window_estimator(tuple(map(tuple, sizes)), noise_scale=phi, **how)
    if found is None:
        return
    parts = np.array(found.parts)
    w = b / (ranks if how["summed"] else b.sum(axis=1, keepdims=True)) / (how["divisor"] or count)
    samples = np.divide(w**2, b, out=np.zeros_like(b), where=b > 0).sum()
    assert found.samples == pytest.approx(w.sum() ** 2 / samples)
    rows = []  # |first_i|^2, |local_i|^2, |g|^2 of each rank, by the mean gradients of all its micro-batches
    for i in range(ranks):
        own = ranks * w * (np.arange(ranks) == i)
        rows += [own * (np.arange(count)[:, None] == 0), own, w]
    rows, each = np.reshape(rows, (3 * ranks, -1)), np.where(b > 0, b, np.inf).ravel()
    assert mean(parts[:, 0].ravel(), rows, each) == pytest.approx((0, 1), abs=1e-6)
    assert mean(parts[:, 1].ravel(), rows, each) == pytest.approx((1, 1 / found.samples), abs=1e-6)
    drawn = np.random.default_rng(seed).uniform(0.5, 2.0, (2, ranks))
    expected, scale = np.einsum("irk,ki->r", parts, [*drawn, np.full(ranks, 1.5)]), np.abs(parts[:, 0]).sum()
    for divided in (False, True):  # ranks that know all of |g|^2, or a part of it
        own = [found.part(i, divided=divided) for i in range(ranks)]
        whole = np.full(ranks, 1.5 / ranks if divided else 1.5)
        assert np.einsum("irk,ki->r", own, [*drawn, whole]) == pytest.approx(expected, rel=1e-6, abs=1e-6 * scale)


# the running average


def run(values, total, running=None, **settings):
    running = RunningNoiseScale(**settings) if running is None else running
    for trace, square in values:
        running = running.update(trace=trace, global_sq_norm=square, total_batch_size=total)
    return running


@given(seeds, st.floats(2, 1e3))
def test_trace_and_norm_are_averaged_by_samples_before_they_are_put_in_relation(seed, horizon):
    """And the noise scales between which they leave the choice, by the spread of what was seen."""
    rng, running, seen, skipped = np.random.default_rng(seed), RunningNoiseScale(horizon=horizon), [], 0
    for _ in range(int(rng.integers(1, 40))):
        trace, square, total = 4 + rng.normal(), 2 + 0.3 * rng.normal(), float(rng.integers(4, 64))
        steps = int(rng.choice([1, 3]))
        bad = rng.choice([math.nan, math.inf, -math.inf, 0.0], p=[0.05, 0.03, 0.02, 0.9])
        if rng.random() < 0.5:
            trace += bad
        else:
            square += bad
        running = running.update(trace=trace, global_sq_norm=square, total_batch_size=total, steps=steps)
        if bad == 0.0:
            seen.append((trace, square, total, steps))
        skipped += steps * (bad != 0.0)
    assert running.skipped == skipped
    if not seen:
        assert all(map(math.isnan, noise_metrics(running).values()))
        assert np.isnan(running.efficiency(np.ones(2), 1.0)).all()
        return

    def averages(count):
        """Means of ``S``, ``|g|^2``, ``1 / B`` and ``|G|^2``, and the variances of the first two by that of a step."""
        s, square, total, steps = np.array(seen[:count]).T
        weight = steps * total * np.exp(-np.append(np.cumsum(steps[::-1])[::-1][1:], 0.0) / horizon)
        mean = [weight @ x / weight.sum() for x in (s, square, 1 / total)]
        return *mean, max(mean[1] - mean[0] * mean[2], 0.0), *[
            (weight**2 / steps) @ x**2 / weight.sum() ** 2 for x in (s, square)
        ]  # fmt: skip

    spreads, rounds = np.array([0.25, 0.04]), 3
    for count in range(1, len(seen)):
        (s, square, total, steps), (trace, _, _, signal, *squares) = seen[count], averages(count)
        rounds, expected = min(rounds + 1, 20), np.array([trace, signal + trace / total])
        off = (np.array([s, square]) / expected - 1) ** 2 / (1 / steps + np.array(squares) / expected**2)
        spreads += (np.minimum(off, 9 * spreads) - spreads) / rounds
    trace, square, inverse, signal, *squares = averages(len(seen))
    samples = sum(total * steps for _, _, total, steps in seen)
    assert (running.trace, running.grad_sq_norm, running.samples) == pytest.approx((trace, signal, samples))
    assert noise_metrics(running)["hetero/noise_scale"] == running.noise_scale == pytest.approx(trace / signal)
    scales = np.array([10 ** (-2 + k / 8) for k in range(33)]) / inverse
    mean = trace * (inverse + 1 / scales)  # of the squared norm, and its error beside that of the trace
    error = mean * np.sqrt(spreads[1] * squares[1] / square**2 + spreads[0] * squares[0] / trace**2)
    likely = np.exp(-0.5 * ((square - mean) / error) ** 2) / error
    assert running.posterior[0] == pytest.approx(scales)
    assert running.posterior[1] == pytest.approx(likely / likely.sum(), rel=1e-6, abs=1e-9)
    shares = [np.prod(((scales + 16) / (scales + b)) ** (likely / likely.sum())) for b in (8, 16, 400)]
    assert running.efficiency(np.array([8.0, 16.0, 400.0]), 16.0) == pytest.approx(np.array(shares), rel=1e-6)
    assert RunningNoiseScale.from_state_dict(json.loads(json.dumps(running.state_dict()))) == running


def test_estimates_below_zero_are_raised_to_zero():
    cases = {(-1.0, 1.0): (0.0, 1.0, 0.0), (80.0, 1.0): (80.0, 0.0, math.inf), (0.0, 0.0): (0.0, 0.0, math.nan)}
    for values, expected in cases.items():
        found = run([values] * 9, 8)
        assert tuple(noise_metrics(found).values()) == pytest.approx((expected[2], *expected[1::-1]), nan_ok=True)


def test_one_odd_step_does_not_make_the_others_worthless():
    """And a noise scale below all that are thought possible is the least of them, with a trace of 0 or nearly so."""
    running = run([(200.0, 1.0 + 2.0)] * 20, 100)
    odd = running.update(trace=2e4, global_sq_norm=300.0, total_batch_size=100)
    after = run([(200.0, 3.0)] * 200, 100, odd)
    totals = np.array([50.0, 400.0])
    assert after.efficiency(totals, 100.0) == pytest.approx(running.efficiency(totals, 100.0), rel=0.05)
    for trace in (0.0, 1e-9, 1e-4):
        found = run([(trace, 1.0)] * 6, 100).efficiency(np.array([10.0, 1000.0]), 100.0)
        assert found == pytest.approx(np.array([10.0, 0.1]), rel=0.15)


def test_gradients_that_cancel_each_other_exactly_are_all_noise():
    found = run([(8.0, 0.0)], 4).efficiency(np.array([4.0, 40.0]), 4.0)
    assert found[0] == pytest.approx(1.0)
    assert 0.3 < found[1] <= 1.0


def test_the_best_total_does_not_depend_on_the_initial_one():
    running, totals = run([(300.0, 1.4)] * 3, 1000), np.geomspace(100, 10_000, 50)
    best = {int((totals / (3 + totals / 1000) * running.efficiency(totals, b0)).argmax()) for b0 in (16, 1000, 16_000)}
    assert len(best) == 1


def test_a_part_from_successive_steps_marks_all_that_follows():
    flagged = RunningNoiseScale().update(trace=1, global_sq_norm=1, total_batch_size=8, biased=True)
    assert run([(1.0, 1.0)], 4, flagged).biased
    assert not run([(1.0, 1.0)], 4).biased
