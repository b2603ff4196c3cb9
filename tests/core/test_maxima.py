"""The largest of several normal values, against drawing them."""

import numpy as np
import pytest

from lightning_hetero.core.maxima import expected_maximum, larger_error


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


def test_without_deviation_it_is_the_largest():
    assert expected_maximum(np.array([1.0, 3.0, 2.0]), np.zeros(3)) == (3.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_larger_of_two_against_drawing_them(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, 8))
    x_error, y_error = rng.uniform(0.05, 1.0, (2, 8))
    drawn = np.maximum(x + x_error * rng.standard_normal((100_000, 8)), y + y_error * rng.standard_normal((100_000, 8)))
    np.testing.assert_allclose(larger_error(x, x_error, y, y_error), drawn.std(axis=0), rtol=0.02)
