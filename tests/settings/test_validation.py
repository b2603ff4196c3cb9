"""Checks of arguments: what passes becomes plain; what does not is named with its value; settings without effect."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.core.no_effect import NoEffect, merged
from lightning_hetero.core.validation import (
    check_choice,
    check_fields,
    check_int,
    check_number,
    check_sizes,
    check_totals,
)

NAN, INF = float("nan"), float("inf")


def share(value):
    return check_number("share", value, low=0, high=1)


def rate(value):
    return check_number("rate", value, low=0, include_low=False)


def steps(value):
    return check_int("steps", value, minimum=1)


def sizes(value):
    return check_sizes("sizes", value, minimum=0, length=2)


@pytest.mark.parametrize(
    ("check", "value", "plain"),
    [
        *((steps, value, int(value)) for value in (1, 7, np.int64(3), np.uint8(200))),
        *((share, value, float(value)) for value in (0, 1, 0.5, np.float32(0.25), Fraction(1, 3))),
        (rate, 1e-300, 1e-300),
        (rate, 1e300, 1e300),
        *((sizes, value, (4, 0)) for value in ([4, 0], (4, 0), np.array([4, 0]), [np.int32(4), 0])),
        (lambda value: check_choice("mode", value, ("mean", "sum")), "sum", "sum"),
    ],
)
def test_what_is_right_becomes_plain(check, value, plain):
    found = check(value)
    assert found == plain
    assert type(found) is type(plain)
    assert not isinstance(found, tuple) or all(type(size) is int for size in found)


@pytest.mark.parametrize(
    ("check", "value", "error", "says"),
    [
        *(
            (steps, v, TypeError, "steps=")
            for v in (1.0, "1", None, True, np.bool_(True), np.float64(1), [1], Fraction(1, 2))
        ),
        *((steps, value, ValueError, f"steps={value} .*>= 1") for value in (0, -1, np.int8(-5))),
        *((share, value, TypeError, "share=.*0 to 1") for value in ("0.5", None, True, 1j, [0.5])),
        *((share, value, ValueError, "share=.*0 to 1") for value in (-1e-9, 1.0001, NAN, INF, -INF)),
        *((rate, value, ValueError, "rate=.*above 0") for value in (0, -1, NAN, INF)),
        *((sizes, value, TypeError, "sizes") for value in ("44", b"44", None, 4, {4, 5})),
        *((sizes, value, TypeError, r"sizes\[1\]") for value in ([4, 4.0], [4, True], [4, [4]])),
        *((sizes, value, TypeError, r"sizes\[0\]") for value in (np.array([4.0, 4.0]), np.array([[4, 4]]))),
        (sizes, [4, -1], ValueError, r"sizes\[1\]=-1"),
        *((sizes, value, ValueError, "sizes") for value in ([], [4], [4, 4, 4])),
        (lambda value: check_choice("mode", value, ("mean", "sum")), "max", ValueError, "mode='max'.*'mean', 'sum'"),
        (lambda value: check_totals(*value), (0, None), ValueError, "max_total_batch_size=0"),
        (lambda value: check_totals(*value), (8, 0), ValueError, "min_total_batch_size=0"),
        (lambda value: check_totals(*value), (8, 9), ValueError, "min_total_batch_size=9"),
        (lambda value: check_totals(*value), (8.0, 4), TypeError, "max_total_batch_size"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(check, value, error, says):
    with pytest.raises(error, match=says):
        check(value)


def test_fields_of_one_range_are_named_with_their_class():
    settings = SimpleNamespace(decay=0.9, share=1.5, none=0.0)
    check_totals(8, 8)
    check_fields(settings, ["decay", "share", "none"])
    for names, more in (
        (["decay", "share"], {"high": 1.0}),
        (["none"], {"include_low": False}),
        (["none"], {"low": 0.1}),
    ):
        with pytest.raises(ValueError, match=rf"SimpleNamespace\.{names[-1]}="):
            check_fields(settings, names, **more)
    with pytest.raises(TypeError, match=r"SimpleNamespace\.decay='fast'"):
        check_fields(SimpleNamespace(decay="fast"), ["decay"])


def test_settings_of_one_reason_are_told_together_in_their_order_and_losses_apart():
    alone, other = ("there is one worker", "Start more"), ("the split is fixed", "Leave it out")
    found = [
        NoEffect(("a=1",), *alone),
        NoEffect(("b=2",), *other),
        NoEffect(("c=3",), *alone),
        NoEffect(("d=4",), *alone, loses=True),
        NoEffect((), "no reason", "Nothing"),
    ]
    assert [(one.settings, one.loses) for one in merged(found)] == [
        (("a=1", "c=3"), False),
        (("b=2",), False),
        (("d=4",), True),
    ]
    for one, verb in ((found[0], "has"), (merged(found)[0], "have")):
        text = str(one)
        assert all(word in text for word in (*one.settings, f" {verb} no effect", *alone))
