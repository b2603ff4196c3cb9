"""Checks of arguments: what passes becomes plain; what does not is named with its value."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.core.validation import (
    check_choice,
    check_fields,
    check_int,
    check_number,
    check_sizes,
    check_totals,
)

NAN, INF = float("nan"), float("inf")
CHECKS = {
    "share": lambda value: check_number("share", value, low=0, high=1),
    "rate": lambda value: check_number("rate", value, low=0, include_low=False),
    "steps": lambda value: check_int("steps", value, minimum=1),
    "sizes": lambda value: check_sizes("sizes", value, minimum=0, length=2),
    "mode": lambda value: check_choice("mode", value, ("mean", "sum")),
    "totals": lambda value: check_totals(*value),
}


@pytest.mark.parametrize(
    ("check", "values", "plain"),
    [
        ("steps", (7, np.int64(7), np.uint8(7)), 7),
        ("share", (1, 1.0, np.float32(1), Fraction(3, 3)), 1.0),
        ("rate", (1e-300,), 1e-300),
        ("sizes", ([4, 0], np.array([4, 0]), [np.int32(4), 0]), (4, 0)),
        ("mode", ("sum",), "sum"),
    ],
)
def test_what_is_right_becomes_plain(check, values, plain):
    for value in values:
        found = CHECKS[check](value)
        assert (found, type(found)) == (plain, type(plain))
        assert not isinstance(found, tuple) or all(type(size) is int for size in found)


@pytest.mark.parametrize(
    ("check", "values", "error", "says"),
    [
        ("steps", (1.0, "1", None, True, np.bool_(True), np.float64(1), [1]), TypeError, "steps="),
        ("steps", (0, np.int8(-5)), ValueError, "steps=.*>= 1"),
        ("share", ("0.5", None, True, 1j, [0.5]), TypeError, "share=.*0 to 1"),
        ("share", (-1e-9, 1.0001, NAN, INF, -INF), ValueError, "share=.*0 to 1"),
        ("rate", (0, -1, NAN, INF), ValueError, "rate=.*above 0"),
        ("sizes", ("44", b"44", None, 4, {4, 5}), TypeError, "sizes"),
        ("sizes", ([4, 4.0], [4, True], [4, [4]]), TypeError, r"sizes\[1\]"),
        ("sizes", (np.array([4.0, 4.0]), np.array([[4, 4]])), TypeError, r"sizes\[0\]"),
        ("sizes", ([4, -1],), ValueError, r"sizes\[1\]=-1"),
        ("sizes", ([], [4], [4, 4, 4]), ValueError, "sizes"),
        ("mode", ("max",), ValueError, "mode='max'.*'mean', 'sum'"),
        ("totals", ((0, None),), ValueError, "max_total_batch_size=0"),
        ("totals", ((8, 0), (8, 9)), ValueError, "min_total_batch_size="),
        ("totals", ((8.0, 4),), TypeError, "max_total_batch_size"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(check, values, error, says):
    for value in values:
        with pytest.raises(error, match=says):
            CHECKS[check](value)


def test_a_field_is_named_with_its_class():
    settings = SimpleNamespace(decay=0.9, share=1.5)
    check_fields(settings, ["decay", "share"])
    with pytest.raises(ValueError, match=r"SimpleNamespace\.share="):
        check_fields(settings, ["decay", "share"], high=1.0)
