"""Checks of arguments, shared by several modules; each error gives the value, the allowed values, and a fix."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from lightning_hetero.core.keywords import closest

__all__ = ["check_choice", "check_fields", "check_int", "check_number", "check_sizes", "check_totals"]


def check_int(name: str, value: Any, *, minimum: int) -> int:
    """Return ``value`` as an int.

    Raises:
        TypeError: if it is not an integer (a bool does not count as one).
        ValueError: if it is below ``minimum``.

    Example:
        >>> check_int("steps", 3, minimum=1)
        3
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an integer >= {minimum}.")
    if value < minimum:
        raise ValueError(f"{name}={value} is too small; give an integer >= {minimum}.")
    return int(value)


def check_number(name: str, value: Any, *, low: float, high: float = math.inf, include_low: bool = True) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: if it is not a real number.
        ValueError: if it is not finite or outside ``low`` to ``high``.

    Example:
        >>> check_number("hysteresis", 0.03, low=0, high=1)
        0.03
    """
    if math.isinf(high):
        allowed = f"a finite number, {low} or more" if include_low else f"a finite number above {low}"
    else:
        allowed = f"a number {'from' if include_low else 'above'} {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give {allowed}.")
    number = float(value)
    if not math.isfinite(number) or number < low or number > high or (number == low and not include_low):
        raise ValueError(f"{name}={value!r} is out of range; give {allowed}.")
    return number


def check_fields(
    settings: object, names: Iterable[str], *, low: float = 0.0, high: float = math.inf, include_low: bool = True
) -> None:
    """Check fields of a settings object that share one range.

    Args:
        settings: the object.
        names: its fields, each a number.
        low: least value.
        high: greatest value.
        include_low: whether the least value itself is allowed.

    Raises:
        TypeError: if a field is not a real number.
        ValueError: if a field is not finite or out of the range; it names the class of the settings.

    Example:
        >>> from types import SimpleNamespace
        >>> check_fields(SimpleNamespace(decay=0.9), ["decay"], high=1.0)
    """
    for name in names:
        where, value = f"{type(settings).__name__}.{name}", getattr(settings, name)
        check_number(where, value, low=low, high=high, include_low=include_low)


def check_sizes(name: str, values: Any, *, minimum: int, length: int | None = None) -> tuple[int, ...]:
    """Return ``values`` as a tuple of ints, one per worker.

    Raises:
        TypeError: if it is not a sequence of integers.
        ValueError: if it is empty, has another length than ``length``, or a value below ``minimum``.

    Example:
        >>> check_sizes("local_batch_sizes", [24, 12, 16], minimum=0, length=3)
        (24, 12, 16)
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise TypeError(f"{name}={values!r} must be a list of integers, one per worker, such as [24, 12, 16].")
    sizes = tuple(values.tolist() if isinstance(values, np.ndarray) else values)
    allowed = [type(size) is int and size >= minimum for size in sizes]
    if not all(allowed):  # format the names only where an error may need them
        sizes = tuple(check_int(f"{name}[{i}]", value, minimum=minimum) for i, value in enumerate(sizes))
    if not sizes:
        raise ValueError(f"{name} is empty; give one integer per worker.")
    if length is not None and len(sizes) != length:
        raise ValueError(f"{name}={list(sizes)} has {len(sizes)} entries for {length} workers; give one per worker.")
    return sizes


def check_totals(most: Any, least: Any) -> None:
    """Check the bounds of a total batch that changes during training.

    Args:
        most: ``max_total_batch_size``.
        least: ``min_total_batch_size``, or ``None``.

    Raises:
        TypeError: if a bound is not an integer.
        ValueError: if a bound is below 1, or ``least`` is above ``most``.

    Example:
        >>> check_totals(4096, 64)
    """
    check_int("max_total_batch_size", most, minimum=1)
    if least is not None and check_int("min_total_batch_size", least, minimum=1) > most:
        raise ValueError(
            f"min_total_batch_size={least} is above max_total_batch_size={most}. Raise the one or lower the other."
        )


def check_choice(name: str, value: Any, allowed: Sequence[Any], more: str = "") -> Any:
    """Return ``value`` if it is one of ``allowed``; an error says ``more`` about what is allowed.

    Raises:
        ValueError: if it is not; the error suggests the nearest one that is.

    Example:
        >>> check_choice("loss_reduction", "mean", ("mean", "sum"))
        'mean'
    """
    if value not in allowed:
        meant = closest(repr(value), [repr(each) for each in allowed if isinstance(each, str)])
        listed = ", ".join(map(repr, allowed))
        raise ValueError(
            f"{name}={value!r} is unknown{f'.{meant} A' if meant else '; a'}llowed are {listed}{more and f' {more}'}."
        )
    return value
