"""Averages of the gradient noise scale: what they fade by, what they correct, and how certain they are."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.noise.running import RunningNoiseScale
from tests.core.noise.test_estimators import TRUE_SQ_NORM, VARIANCES, coefficients, norms


def run(values, batch_size, running=None, **settings):
    """A running estimate after steps of ``(trace, |g|^2)``."""
    running = RunningNoiseScale(**settings) if running is None else running
    for trace, sq_norm in values:
        running = running.update(trace=trace, global_sq_norm=sq_norm, total_batch_size=batch_size)
    return running


def same(one, other):
    return one.state_dict() == pytest.approx(other.state_dict())


def test_trace_and_norm_are_averaged_before_they_are_put_in_relation():
    steps = [(4.0, 1.5), (-2.0, 0.5), (10.0, 3.0)]  # the second has a trace below 0, the ratio of each is far off
    running = run(steps, 8, horizon=1e12)
    assert running.trace == pytest.approx(4.0, rel=1e-6)
    assert running.grad_sq_norm == pytest.approx(5 / 3 - 4.0 / 8, rel=1e-6)
    assert running.noise_scale == pytest.approx(4.0 / (5 / 3 - 0.5), rel=1e-6)


def test_running_average_finds_the_noise_scale():
    sizes = (16, 4, 2, 2)
    sigma, total = VARIANCES["anisotropic"], sum(sizes)
    values = norms(sizes, "anisotropic")[:4000]
    _, traces = coefficients("pooled", sizes) @ values.T
    running = run(zip(traces.tolist(), values[:, -1].tolist(), strict=True), total, horizon=1e6)
    assert running.noise_scale == pytest.approx(sigma.sum() / TRUE_SQ_NORM, rel=0.05)


@pytest.mark.parametrize("samples", [64, 640, 64_000])
def test_decay_is_per_sample(samples):
    """The same samples in batches of 16 and of 64, after a change: both have forgotten equally much of what was."""
    small, big = (run([(9.0, 2.0)] * (6400 // b), b, horizon=1000) for b in (16, 64))
    small, big = (run([(1.0, 2.0)] * (samples // b), b, old) for b, old in ((16, small), (64, big)))
    assert small.trace == pytest.approx(big.trace)
    assert small.trace == pytest.approx(1 + 8 * math.exp(-samples / 1000), rel=0.01)
    assert small.weight == pytest.approx(big.weight)
    assert small.samples == big.samples == 6400 + samples


def test_norms_of_different_totals_are_corrected_by_their_own():
    """``E|g|^2 = |G|^2 + tr(Sigma) / B`` with ``B`` changing on the way."""
    running = RunningNoiseScale(horizon=500)
    for total in (8, 64, 16, 128, 32):
        running = running.update(trace=40.0, global_sq_norm=2.0 + 40.0 / total, total_batch_size=total)
    assert running.grad_sq_norm == pytest.approx(2.0)
    assert running.noise_scale == pytest.approx(20.0)


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_bias_is_corrected_from_the_first_step_on(steps):
    running = run([(4.0, 1.5)] * steps, 8, horizon=1e6)
    assert (running.trace, running.grad_sq_norm) == pytest.approx((4.0, 1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["trace", "global_sq_norm"])
def test_values_that_are_not_finite_only_count(name, bad):
    before = run([(4.0, 1.5)] * 3, 8)
    after = before.update(**({"trace": 4.0, "global_sq_norm": 1.5} | {name: bad}), total_batch_size=8)
    assert after.skipped == before.skipped + 1
    assert after.state_dict() | {"skipped": 0} == before.state_dict() | {"skipped": 0}
    several = before.update(trace=4.0, global_sq_norm=bad, total_batch_size=8, steps=7)
    assert several.skipped == before.skipped + 7


def test_nothing_is_known_before_the_first_step():
    for running in (RunningNoiseScale(), run([(math.nan, 1.0)] * 4, 8)):
        assert math.isnan(running.trace)
        assert math.isnan(running.grad_sq_norm)
        assert math.isnan(running.noise_scale)


def test_estimates_below_zero_are_raised_to_zero():
    assert run([(-1.0, 1.0)], 8).noise_scale == 0
    assert run([(-1.0, 1.0)], 8).grad_sq_norm == 1  # no noise is subtracted, rather than a negative one
    assert run([(80.0, 1.0)], 8).grad_sq_norm == 0
    assert run([(80.0, 1.0)], 8).noise_scale == math.inf
    assert math.isnan(run([(0.0, 0.0)], 8).noise_scale)  # a model without gradients


def test_merge_is_the_weighted_whole():
    one, other = run([(4.0, 1.5)] * 5, 8, horizon=100), run([(10.0, 3.0), (math.nan, 1.0)], 32, horizon=100)
    both = one.merge(other)
    w = np.array([one.weight, other.weight])
    assert both.trace == pytest.approx(w @ [4.0, 10.0] / w.sum())
    assert both.grad_sq_norm == pytest.approx(w @ [1.5, 3.0] / w.sum() - both.trace * (w @ [1 / 8, 1 / 32]) / w.sum())
    assert (both.samples, both.skipped) == (72, 1)
    assert same(both, other.merge(one))
    assert same(RunningNoiseScale(horizon=100).merge(one), one)
    assert one.merge(RunningNoiseScale(horizon=900)).horizon == 100  # it goes on with its own


def test_bias_flag_stays():
    flagged = RunningNoiseScale().update(trace=1.0, global_sq_norm=1.0, total_batch_size=4, biased=True)
    assert run([(1.0, 1.0)], 4, flagged).biased
    assert RunningNoiseScale().merge(flagged).biased
    assert not run([(1.0, 1.0)], 4).biased


def test_one_update_of_many_steps_is_as_many_equal_updates():
    start = run([(9.0, 2.0)] * 3, 16, horizon=300)
    at_once = start.update(trace=4.0, global_sq_norm=1.5, total_batch_size=8, steps=7)
    one_by_one = run([(4.0, 1.5)] * 7, 8, start)
    assert at_once.weight_squares > one_by_one.weight_squares  # a mean scatters less, and is one that was seen
    assert same(replace(at_once, weight_squares=0.0), replace(one_by_one, weight_squares=0.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("signal", [1.0, 0.2])
def test_the_error_is_what_estimates_scatter_by(seed, signal):
    """Of many runs of 200 steps each, about two thirds are within one standard error."""
    rng, total, inside, runs = np.random.default_rng(seed), 32, 0, 60
    for _ in range(runs):
        running = RunningNoiseScale(horizon=1e9)
        for _ in range(200):
            trace = 10.0 * (1 + 0.4 * rng.standard_normal())
            norm = (signal + 10.0 / total) * (1 + 0.1 * rng.standard_normal())
            running = running.update(trace=trace, global_sq_norm=norm, total_batch_size=total)
        inside += abs(running.noise_scale / (10.0 / signal) - 1) < running.relative_error
    assert 0.5 < inside / runs < 0.85


def test_the_error_is_unknown_at_first():
    assert RunningNoiseScale().relative_error == math.inf
    assert run([(4.0, 1.5)] * 5, 8).relative_error == math.inf
    assert run([(4.0, 1.5), (5.0, 1.4)] * 10, 8).relative_error < 0.5


def test_state_survives_json():
    running = run([(4.0, 1.5), (math.nan, 0.0), (3.0, 1.0)], 8, horizon=123.0)
    assert RunningNoiseScale.from_state_dict(json.loads(json.dumps(running.state_dict()))) == running
