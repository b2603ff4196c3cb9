"""Each check says what it got, what is allowed, and how to fix it."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.core.validation import check_choice, check_fields, check_int, check_number, check_sizes

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [1, 7, np.int64(3), np.uint8(200)])
def test_integers_become_plain_ints(value):
    checked = check_int("steps", value, minimum=1)
    assert type(checked) is int
    assert checked == value


@pytest.mark.parametrize("value", [1.0, "1", None, True, False, np.bool_(True), np.float64(1), [1], Fraction(1, 2)])
def test_what_is_no_integer(value):
    with pytest.raises(TypeError, match=r"steps=.* is a \w+; give an integer >= 1"):
        check_int("steps", value, minimum=1)


@pytest.mark.parametrize("value", [0, -1, np.int8(-5)])
def test_integers_below_the_minimum(value):
    with pytest.raises(ValueError, match=f"steps={value} is too small; give an integer >= 1"):
        check_int("steps", value, minimum=1)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.25), Fraction(1, 3)])
def test_numbers_become_plain_floats(value):
    checked = check_number("share", value, low=0, high=1)
    assert type(checked) is float
    assert checked == pytest.approx(float(value))


@pytest.mark.parametrize("value", ["0.5", None, True, 1j, [0.5]])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match="share=.* give a number from 0 to 1"):
        check_number("share", value, low=0, high=1)


@pytest.mark.parametrize("value", [-1e-9, 1.0001, NAN, INF, -INF])
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match="share=.* is out of range; give a number from 0 to 1"):
        check_number("share", value, low=0, high=1)


def test_lower_end_can_be_excluded():
    assert check_number("rate", 1e-300, low=0, include_low=False) == 1e-300
    with pytest.raises(ValueError, match="rate=0 is out of range; give a finite number above 0"):
        check_number("rate", 0, low=0, include_low=False)


@pytest.mark.parametrize("values", [[4, 0], (4, 0), np.array([4, 0]), [np.int32(4), 0]])
def test_sizes_become_a_tuple_of_plain_ints(values):
    checked = check_sizes("sizes", values, minimum=0, length=2)
    assert checked == (4, 0)
    assert all(type(size) is int for size in checked)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ("44", TypeError, "must be a list of integers"),
        (b"44", TypeError, "must be a list of integers"),
        (None, TypeError, "must be a list of integers"),
        (4, TypeError, "must be a list of integers"),
        ({4, 5}, TypeError, "must be a list of integers"),
        ([4, 4.0], TypeError, r"sizes\[1\]=4.0 is a float"),
        ([True, 4], TypeError, r"sizes\[0\]=True is a bool"),
        ([[4, 4]], TypeError, r"sizes\[0\]=\[4, 4\] is a list"),
        (np.array([4.0, 4.0]), TypeError, r"sizes\[0\]=4.0 is a float"),
        (np.array([[4, 4]]), TypeError, r"sizes\[0\]=\[4, 4\] is a list"),
        ([4, -1], ValueError, r"sizes\[1\]=-1 is too small"),
        ([], ValueError, "is empty"),
        ([4], ValueError, "1 entries for 2 workers"),
        ([4, 4, 4], ValueError, "3 entries for 2 workers"),
    ],
)
def test_bad_sizes(values, error, says):
    with pytest.raises(error, match=says):
        check_sizes("sizes", values, minimum=0, length=2)


def test_choice():
    assert check_choice("mode", "sum", ("mean", "sum")) == "sum"
    with pytest.raises(ValueError, match="mode='max' is unknown; allowed are 'mean', 'sum'"):
        check_choice("mode", "max", ("mean", "sum"))


def test_fields_of_one_range_are_named_with_their_class():
    settings = SimpleNamespace(decay=0.9, share=1.5)
    check_fields(settings, ["decay", "share"])
    with pytest.raises(ValueError, match=r"SimpleNamespace\.share=1\.5 is out of range; .* 0\.0 to 1\.0"):
        check_fields(settings, ["decay", "share"], high=1.0)
    with pytest.raises(TypeError, match=r"SimpleNamespace\.decay='fast'"):
        check_fields(SimpleNamespace(decay="fast"), ["decay"])
