"""The normal distribution against SciPy's, out to where it is 0."""

import numpy as np
import pytest
from scipy.stats import norm

from lightning_hetero.core.normal import FAR, normal_cdf, normal_pdf


@pytest.mark.parametrize("shape", [(1,), (7,), (33, 4), (0,)])
def test_of_any_shape_as_scipys(shape):
    z = np.random.default_rng(0).normal(scale=3.0, size=shape)
    np.testing.assert_allclose(normal_cdf(z), norm.cdf(z), rtol=1e-8, atol=1e-15)
    np.testing.assert_allclose(normal_pdf(z), norm.pdf(z), rtol=1e-14)


def test_from_end_to_end():
    z = np.concatenate([np.linspace(-37.0, 37.0, 20_001), [FAR, -FAR, 0.0, -1e300, 1e300, -np.inf, np.inf]])
    found = normal_cdf(z)
    np.testing.assert_allclose(found, norm.cdf(z), rtol=2e-8, atol=3e-16)
    assert (np.diff(found[:20_001]) >= 0.0).all()
    assert found[-4:].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_near_the_mean_all_digits_are_right():
    z = np.linspace(-3.0, 3.0, 4001)
    np.testing.assert_allclose(normal_cdf(z), norm.cdf(z), rtol=1e-13, atol=0.0)


def test_what_is_given_is_left_as_it_is():
    z = np.array([-9.0, 0.5, 9.0])
    normal_cdf(z)
    assert z.tolist() == [-9.0, 0.5, 9.0]


def test_no_number_gives_no_number():
    assert np.isnan(normal_cdf(np.array([np.nan]))).all()
