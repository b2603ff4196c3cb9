"""The largest of several normal values, against drawing them."""

import math

import numpy as np
import pytest

from lightning_hetero.core.timing import expected_maximum as module
from lightning_hetero.core.timing.expected_maximum import expected_maximum, larger_error


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_of_many_against_drawing_them(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 200))
    mean, deviation = rng.uniform(1, 1 + rng.uniform(0, 1), n), rng.uniform(0, 0.2, n) * (rng.random(n) < 0.8)
    drawn = (mean + deviation * rng.standard_normal((40_000, n))).max(axis=1)
    expected, spread = expected_maximum(mean, deviation)
    scale = max(float(deviation.max()), 1e-9)
    assert expected == pytest.approx(drawn.mean(), abs=0.03 * scale)
    assert spread == pytest.approx(drawn.std(), abs=0.05 * scale)


@pytest.mark.parametrize("seed", range(8))
def test_values_of_very_unlike_deviations_against_a_fine_quadrature(seed):
    """Of a worker that is hardly known beside others that are well known, say."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 20))
    mean, deviation = np.exp(0.1 * rng.standard_normal(n)), 10.0 ** rng.uniform(-4, -0.5, n)
    low, high = (mean - 8 * deviation).max(), (mean + 8 * deviation).max()
    x = np.concatenate([np.linspace(low, high, 2001), *(mean[:, None] + deviation[:, None] * np.linspace(-8, 8, 401))])
    x = np.unique(x[(x >= low) & (x <= high)])
    below = np.array([[0.5 * math.erfc(-z / 2**0.5) for z in row] for row in (x[:, None] - mean) / deviation])
    above = 1 - below.prod(axis=1)
    first = float(np.diff(x) @ (above[1:] + above[:-1])) / 2
    second = float(np.diff(x) @ (above[1:] * (x[1:] - low) + above[:-1] * (x[:-1] - low)))
    expected, spread = expected_maximum(mean, deviation)
    assert expected == pytest.approx(low + first, abs=0.003 * deviation.max())
    assert spread == pytest.approx(math.sqrt(second - first**2), abs=0.003 * deviation.max())


@pytest.mark.parametrize(("n", "expected", "spread"), [(1, 0.0, 1.0), (2, 1 / math.pi**0.5, (1 - 1 / math.pi) ** 0.5)])
def test_the_largest_of_one_or_two_alike_is_known_exactly(n, expected, spread):
    found = expected_maximum(np.full(n, 5.0), np.full(n, 2.0))
    assert found == pytest.approx((5.0 + 2 * expected, 2 * spread), abs=0.003 * 2)


@pytest.mark.parametrize("seed", range(8))
def test_many_values_are_as_if_each_were_counted_by_itself(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(501, 4000))
    deviation = rng.uniform(0.01, 0.03, 3)[rng.integers(0, 3, n)] * rng.uniform(0.9, 1.1, n)
    mean = rng.uniform(1, 1 + 0.2 * rng.random(), n)
    found = expected_maximum(mean, deviation)
    assert len(module.counted_together(mean, deviation)[0]) < n
    monkeypatch.setattr(module, "MANY", n)
    assert found == pytest.approx(expected_maximum(mean, deviation), abs=0.004 * float(deviation.max()))


def test_without_deviation_it_is_the_largest():
    assert expected_maximum(np.array([1.0, 3.0, 2.0]), np.zeros(3)) == (3.0, 0.0)


@pytest.mark.parametrize("widest", [0.01, 1e-11, 1e-15])
def test_a_value_that_is_certain_stands_above_uncertain_ones_far_below(widest):
    mean, deviation = np.array([1.0, 0.5, 0.4]), np.array([0.0, widest, 0.5 * widest])
    assert expected_maximum(mean, deviation) == (1.0, 0.0)
    assert expected_maximum(mean, deviation + [1e-14, 0.0, 0.0])[0] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_larger_of_two_against_drawing_them(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, 8))
    x_error, y_error = rng.uniform(0.05, 1.0, (2, 8))
    shared, own = rng.standard_normal((2, 100_000, 8))
    correlation = rng.uniform(-1.0, 1.0, 8)
    other = correlation * shared + np.sqrt(1.0 - correlation**2) * own
    drawn = np.maximum(x + x_error * shared, y + y_error * other)
    found = larger_error(x, x_error, y, y_error, correlation * x_error * y_error)
    np.testing.assert_allclose(found, drawn.std(axis=0), rtol=0.02, atol=1e-4)
