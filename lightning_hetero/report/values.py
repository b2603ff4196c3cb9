"""Numbers of a report: each has a key, its exact value, and the text that stands for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup, escape

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.limit import limit_of
from lightning_hetero.simulate.planning.units import format_seconds

__all__ = ["UNKNOWN", "Cell", "Value", "number", "plain", "verdict"]

UNKNOWN = "–"
"""Text of a number that is not known."""


@dataclass(frozen=True)
class Value:
    """One number of a report.

    Args:
        key: name of the number, unique in the report except for repetitions of it.
        value: the number itself.
        text: what is shown.
    """

    key: str
    value: float
    text: str

    def __html__(self) -> str:
        """Return the element that shows the number and carries its exact value."""
        known = f' value="{float(self.value):.12g}"' if math.isfinite(self.value) else ' class="unknown"'
        return Markup('<data data-key="{}"{}>{}</data>').format(self.key, Markup(known), escape(self.text))


Cell = str | Value
"""Content of a table's cell."""


def number(key: str, value: float, kind: str) -> Value:
    """Return a number of a report.

    Args:
        key: its name.
        value: seconds, a share, samples/s and so on; not finite if it is not known.
        kind: one of the keys of :data:`TEXTS`.

    Example:
        >>> [number("x", value, kind).text for value, kind in ((0.0273, "seconds"), (0.0423, "share"), (1.84, "times"))]
        ['27.3 ms', '4.2 %', '1.84x']
        >>> number("x", math.nan, "rate").text
        '–'
    """
    return Value(key, value, TEXTS[kind](value) if math.isfinite(value) else UNKNOWN)


def _seconds(value: float) -> str:
    if value == 0:
        return "0 s"
    return f"-{format_seconds(-value)}" if value < 0 else format_seconds(value)


def _digits(value: float) -> str:
    """Return three digits, or all digits before the point."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100.0 * value:.2g} %" if 0 < abs(value) < 0.01 else f"{100.0 * value:.1f} %"


def _scaled(value: float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


TEXTS: dict[str, Callable[[float], str]] = {
    "seconds": _seconds,
    "share": _share,
    "gain": lambda value: f"{100.0 * value:+.1f} %",
    "times": lambda value: f"{value:.2f}x",
    "rate": _digits,
    "count": lambda value: f"{value:,.0f}",
    "number": _digits,
    "bytes": lambda value: _scaled(value, "B"),
    "flops": lambda value: _scaled(value, "FLOP/s"),
}
"""Text of a number by its kind."""


def plain(text: object, most: int = 300) -> str:
    r"""Return a text of a record without control characters and lone surrogates, and without its middle if it is long.

    Example:
        >>> plain("two\nlines"), len(plain("x" * 1000))
        ('two lines', 300)
    """
    shown = "".join(one if one.isprintable() or one == " " else " " for one in str(text)).strip()
    half = (most - 5) // 2
    return shown if len(shown) <= most else f"{shown[:half]} ... {shown[half + 5 - most :]}"


def verdict(figures: RunFigures) -> str:
    """Return the outcome of a run in one line.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> from lightning_hetero.core.report.run_record import RunRecord
        >>> verdict(RunFigures(RunRecord(RunHeader(0.0, "0.2.0", "Trainer", "hetero_ddp", "pid", (), 8))))
        'No step was timed, so that the record has no speed.'
    """
    if not figures.last:
        return "No step was timed, so that the record has no speed."
    if len(figures.last[-1].sizes) == 1:
        return f"{TEXTS['rate'](figures.rate)} samples/s on one worker; limited by: {limit_of(figures)}"
    parts = [figures.over] if figures.over else []
    parts.append(f"{100.0 * figures.idle:.0f} % idle")
    return "; ".join([*parts, f"limited by: {limit_of(figures)}"])
