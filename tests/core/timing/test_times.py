"""Settings of the estimators, in their ranges only; and times of workers with their errors."""

import math
from dataclasses import fields

import numpy as np
import pytest

from lightning_hetero.core.timing.times import EstimatorSettings, Times

NUMBERS = [field.name for field in fields(EstimatorSettings) if field.name not in ("walks", "rounds", "prior")]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
def test_a_number_out_of_its_range_is_refused_by_name(name, wrong):
    with pytest.raises(ValueError, match=rf"EstimatorSettings\.{name}="):
        EstimatorSettings(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("jump_probability", 0.0),
        ("jump_probability", 1.0),
        ("skew_probability", 1.0),
        ("switch", 1.1),
        ("wide", 1.1),
        ("residual_shortfall", 1.1),
        ("skew_stall", 0.9),
        ("gate", 0.0),
        ("least_part", 0.0),
        ("residual_prior", 0.0),
    ],
)
def test_a_number_at_the_wrong_side_of_its_bound_is_refused(name, wrong):
    with pytest.raises(ValueError, match=rf"EstimatorSettings\.{name}="):
        EstimatorSettings(**{name: wrong})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"walks": (0.1,)}, "differ in length"),
        ({"walks": (), "rounds": (), "prior": ()}, "differ in length"),
        ({"walks": (0.0,), "rounds": (1.0,), "prior": (1.0,)}, r"EstimatorSettings\.walks=0\.0"),
        ({"walks": (0.1,), "rounds": (-1.0,), "prior": (1.0,)}, r"EstimatorSettings\.rounds=-1\.0"),
        ({"walks": (0.1,), "rounds": (1.0,), "prior": (0.0,)}, r"sum of EstimatorSettings\.prior"),
    ],
)
def test_filters_have_one_value_of_each_kind(given, says):
    with pytest.raises(ValueError, match=says):
        EstimatorSettings(**given)


def test_seconds_and_errors_are_those_of_drawn_coefficients():
    rng, sizes = np.random.default_rng(0), np.array([10.0, 40.0])
    mean = np.array([[0.001, 0.01, 0.002, 0.02], [0.003, 0.0, 0.004, 0.01]])
    root = 1e-3 * rng.standard_normal((2, 4, 4))
    times = Times(mean, root @ root.swapaxes(1, 2), np.zeros((2, 2)), np.ones(1), np.ones(1))
    seconds, errors = times.seconds(sizes, backward=0.3, outside=2.0)
    a, p = times.parts(sizes)
    np.testing.assert_allclose(seconds, 2.0 * a + 0.3 * p)
    for worker in range(2):
        q, s, k, m = rng.multivariate_normal(mean[worker], times.covariance[worker], 200_000).T
        drawn = 2.0 * (q * sizes[worker] + s) + 0.3 * (k * sizes[worker] + m)
        assert errors[worker] == pytest.approx(drawn.std(), rel=0.02)


def test_single_steps_vary_as_the_sum_of_two_parts_that_vary_each_by_itself():
    rng, sizes = np.random.default_rng(0), np.array([10.0, 40.0])
    mean = np.array([[0.001, 0.01, 0.002, 0.02], [0.003, 0.0, 0.004, 0.01]])
    jitter = np.array([[0.3, 0.1], [0.02, 0.2]])
    times = Times(mean, np.zeros((2, 4, 4)), jitter, np.ones(1), np.ones(1))
    drawn = sum(
        part * (1 + deviation * rng.standard_normal((200_000, 2)))
        for part, deviation in zip(times.parts(sizes), jitter.T, strict=True)
    )
    np.testing.assert_allclose(times.single_steps(sizes), drawn.std(axis=0) / drawn.mean(axis=0), rtol=0.01)
