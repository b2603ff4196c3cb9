"""Numbers of log lines keep their digits before the point and have no powers of ten."""

import math
import re

import numpy as np
import pytest

from lightning_hetero.core.rounded import rounded


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_numbers_of_any_size_have_no_power_of_ten(digits):
    draw = np.random.default_rng(digits)
    for value in 10 ** draw.uniform(-3, 12, 2000) * draw.choice([-1, 1], 2000):
        text = rounded(value, digits)
        assert re.fullmatch(r"-?\d+(\.\d+)?", text)
        unit = 10.0 ** min(math.floor(math.log10(abs(value))) - digits + 1, 0)
        assert abs(float(text) - value) <= 0.501 * unit


def test_at_a_thousand():
    assert [rounded(value) for value in (999.4, 999.6, 1000.0, 1234.5678, -12345.6)] == [
        *("999", "1000", "1000", "1235", "-12346")
    ]


def test_what_is_no_number_is_said():
    assert [rounded(value) for value in (math.nan, math.inf, 0.0)] == ["nan", "inf", "0"]
