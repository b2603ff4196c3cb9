"""Types of fields: which values are in a range, at its ends as well, and which lengths a list may have."""

import math
from typing import get_args

import pytest

from lightning_hetero.core.report.field_types import (
    Amount,
    Count,
    Event,
    Length,
    Natural,
    Number,
    Range,
    Rank,
    Seconds,
    Share,
    Sizes,
    shown,
)

ENDS = {
    "Count": (Count, 0, 2**53),
    "Natural": (Natural, 1, 2**53),
    "Rank": (Rank, -1, 2**53),
    "Seconds": (Seconds, 0, 1e9),
    "Amount": (Amount, 0, 1e100),
    "Number": (Number, -1e100, 1e100),
    "Share": (Share, 0, 1),
}


def error(kind, value, workers=2):
    return "; ".join(filter(None, (one.error(value, workers) for one in get_args(kind)[1:])))


@pytest.mark.parametrize("name", ENDS)
def test_both_ends_of_a_range_are_in_it(name):
    kind, low, high = ENDS[name]
    assert error(kind, low) == error(kind, high) == error(kind, math.nan) == ""
    assert error(kind, low - max(1, abs(low))).endswith(f"is below {low:g}, the least value allowed")
    assert error(kind, 2 * high).endswith(f"is above {high:g}, the largest value allowed")


def test_sums_and_products_of_the_largest_values_are_finite():
    largest = 2.0**53 * 1e100
    assert math.isfinite(largest * largest)


def test_lengths():
    assert Length().error((1, 2), 2) == Length().error((1, 2, 3), 0) == Length(optional=True).error((), 2) == ""
    assert Length().error((), 2) == "has 0 values, and the run has 2 workers"
    assert Length(optional=True).error((1,), 2) == "has 1 values, and the run has 2 workers"
    assert Length(2).error((1, 2), 9) == Length(2, exact=False).error((1, 2, 3), 9) == ""
    assert Length(2).error((1, 2, 3), 9) == "has 3 values; 2 are needed"
    assert Length(2, exact=False).error((1,), 9) == "has 1 values; at least 2 are needed"


def test_samples_of_a_step_are_positive_together():
    assert error(Sizes, (0, 1)) == ""
    assert error(Sizes, (0, 0)) == "has no positive value"


def test_words_and_long_values():
    assert error(Event, "begin") == error(Event, "end") == ""
    assert error(Event, "ended") == "'ended' is none of 'begin', 'end'"
    assert shown(None) == "null"
    assert len(Range(0, 1).error(10**400, 2)) < 100
