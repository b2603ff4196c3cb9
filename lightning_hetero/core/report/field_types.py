"""Types of the fields of a run's record, with the values that each allows; lines are checked by them when read."""

import reprlib
from dataclasses import dataclass
from typing import Annotated, Any

__all__ = [
    "SAMPLED",
    "Amount",
    "Bounds",
    "Coefficients",
    "Count",
    "Event",
    "Length",
    "Natural",
    "Number",
    "Range",
    "Rank",
    "Sample",
    "Seconds",
    "Share",
    "Sizes",
    "WorkerAmounts",
    "WorkerSeconds",
    "shown",
]

MOST_COUNT = 2**53
"""Largest integer, up to which each has a floating-point number of its own."""
MOST_SECONDS = 1e9
"""Longest time: 32 years."""
MOST = 1e100
"""Largest other number, of which sums and products are still finite."""


def shown(value: object) -> str:
    """Return a value as text for an error, without its middle if it is long.

    Example:
        >>> shown("soon"), len(shown(10**400)) < 50
        ("'soon'", True)
    """
    return "null" if value is None else reprlib.repr(value)


@dataclass(frozen=True)
class Range:
    """Range of a number; NaN, which stands for one that is not known, lies in it.

    Args:
        low: least value.
        high: largest value.

    Example:
        >>> Range(0, 1).error(1.5, 2)
        '1.5 is above 1, the largest value allowed'
    """

    low: float
    high: float

    def error(self, value: Any, workers: int) -> str:
        """Return what is wrong with a value, empty if nothing is."""
        if value < self.low:
            return f"{shown(value)} is below {self.low:g}, the least value allowed"
        return f"{shown(value)} is above {self.high:g}, the largest value allowed" if value > self.high else ""


@dataclass(frozen=True)
class Length:
    """Length of a list.

    Args:
        least: fewest values, ``None`` for one per worker.
        exact: whether there may be no more.
        optional: whether the list may be empty.

    Example:
        >>> Length().error((1, 2, 3), 2)
        'has 3 values, and the run has 2 workers'
    """

    least: int | None = None
    exact: bool = True
    optional: bool = False

    def error(self, values: Any, workers: int) -> str:
        """Return what is wrong with a list, empty if nothing is."""
        if self.optional and not values:
            return ""
        if self.least is None:
            wrong = workers and len(values) != workers
            return f"has {len(values)} values, and the run has {workers} workers" if wrong else ""
        if len(values) < self.least or (self.exact and len(values) > self.least):
            return f"has {len(values)} values; {'' if self.exact else 'at least '}{self.least} are needed"
        return ""


@dataclass(frozen=True)
class Positive:
    """Sum of a list that must be positive."""

    def error(self, values: Any, workers: int) -> str:
        """Return what is wrong with a list, empty if nothing is."""
        return "" if sum(values) > 0 else "has no positive value"


@dataclass(frozen=True)
class Choice:
    """Choice among words.

    Args:
        words: those allowed.
    """

    words: tuple[str, ...]

    def error(self, value: Any, workers: int) -> str:
        """Return what is wrong with a word, empty if nothing is."""
        return "" if value in self.words else f"{shown(value)} is none of {', '.join(map(repr, self.words))}"


Count = Annotated[int, Range(0, MOST_COUNT)]
Natural = Annotated[int, Range(1, MOST_COUNT)]
Rank = Annotated[int, Range(-1, MOST_COUNT)]
Seconds = Annotated[float, Range(0, MOST_SECONDS)]
Amount = Annotated[float, Range(0, MOST)]
Number = Annotated[float, Range(-MOST, MOST)]
Share = Annotated[float, Range(0, 1)]
Event = Annotated[str, Choice(("begin", "end"))]

Sizes = Annotated[tuple[Count, ...], Length(), Positive()]
Bounds = Annotated[tuple[Count, ...], Length(optional=True)]
WorkerSeconds = Annotated[tuple[Seconds, ...], Length(optional=True)]
WorkerAmounts = Annotated[tuple[Amount, ...], Length(optional=True)]
Coefficients = Annotated[tuple[Annotated[tuple[Amount, ...], Length(4)], ...], Length(optional=True)]

SAMPLED = (
    *("size", "forward", "backward", "first_bucket", "overlapped_sync", "last_sync", "step_time"),
    *("data", "optimizer"),
)
"""Values of a sampled step, which the ends of the buckets follow."""
Row = Annotated[tuple[Number, ...], Length(len(SAMPLED), exact=False)]
Sample = tuple[Annotated[tuple[Row, ...], Length()], ...]
