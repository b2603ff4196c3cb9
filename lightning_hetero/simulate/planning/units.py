"""Numbers with units, as in ``100Mbit``, ``1ms`` and ``124M``; anything else is refused."""

import math
import re

from lightning_hetero.simulate.devices.names import closest

__all__ = ["format_rate", "format_seconds", "parse_bytes", "parse_count", "parse_number", "parse_rate", "parse_seconds"]

NUMBER = r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
RATES = {f"{p}{unit}": factor / bits for unit, bits in (("bit", 8), ("B", 1)) for p, factor in PREFIXES.items()}
RATES |= {f"{prefix}bps": factor / 8 for prefix, factor in PREFIXES.items()}
SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Units in a second: dividing keeps ``50us`` the number that ``5e-05`` is."""
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
BYTES = {f"{prefix}B": factor for prefix, factor in PREFIXES.items()}


def parse_rate(text: object) -> float:
    """Return bytes per second; ``inf`` is a link without a limit.

    Raises:
        ValueError: if it is no rate with a unit.

    Example:
        >>> parse_rate("100Mbit"), parse_rate("1.5 GB/s"), parse_rate("inf")
        (12500000.0, 1500000000.0, inf)
    """
    if str(text).strip() == "inf":
        return math.inf
    plain = re.sub(r"/s$", "", str(text).strip())
    return _with_unit("rate", plain, text, RATES, "100Mbit, 10Gbit, 12.5MB/s, or inf", above_zero=True)


def parse_seconds(text: object) -> float:
    """Return seconds.

    Raises:
        ValueError: if it is no time with a unit.

    Example:
        >>> parse_seconds("50us"), parse_seconds("1.5ms")
        (5e-05, 0.0015)
    """
    units = dict.fromkeys(SECONDS, 1.0)
    value = _with_unit("time", str(text).strip(), text, units, "50us, 1.5ms or 2s")
    return value / SECONDS[re.sub(r"[^a-z]", "", re.sub(r"[eE][+-]?\d+", "", str(text)))]


def parse_bytes(text: object) -> float:
    """Return a number of bytes.

    Raises:
        ValueError: if it is no number with a unit.

    Example:
        >>> parse_bytes("496MB")
        496000000.0
    """
    return _with_unit("size", str(text).strip(), text, BYTES, "496MB or 1.5GB")


def parse_count(text: object) -> int:
    """Return a whole number, ``>= 1``.

    Raises:
        ValueError: if it is none.

    Example:
        >>> parse_count("123.6M"), parse_count("50k"), parse_count(64)
        (123600000, 50000, 64)
    """
    value = _with_unit("number", str(text).strip(), text, COUNTS, "50000, 50k, 124M or 1.3B", above_zero=True)
    if isinstance(text, bool) or abs(value - round(value)) > 1e-9 * value or round(value) < 1:
        raise ValueError(f"{text!r} is not a whole number >= 1.")
    return round(value)


def parse_number(text: object, low: float = 0.0, high: float = math.inf) -> float:
    """Return a plain number in a range.

    Raises:
        ValueError: if it is none, or out of the range.

    Example:
        >>> parse_number("1e-3"), parse_number(2)
        (0.001, 2.0)
    """
    if isinstance(text, bool) or not re.fullmatch(rf"-?{NUMBER}", str(text).strip()):
        raise ValueError(f"{text!r} is not a number; give one from {low:g} to {high:g}.")
    value = float(str(text))
    if not low <= value <= high or math.isinf(value):
        raise ValueError(f"{text!r} is out of range; give a number from {low:g} to {high:g}.")
    return value


def _with_unit(
    what: str, text: str, given: object, units: dict[str, float], examples: str, *, above_zero: bool = False
) -> float:
    match = re.fullmatch(rf"{NUMBER}\s*(?P<unit>[A-Za-z]*)", text)
    if not match or isinstance(given, bool):
        raise ValueError(f"{given!r} is no {what}; give a number with its unit, such as {examples}.")
    if match["unit"] not in units:
        unit = match["unit"] or "none"
        near = closest(match["unit"], [name for name in units if name])
        raise ValueError(f"{given!r} has the unit {unit}.{near} Give, for example, {examples}.")
    value = float(match["number"]) * units[match["unit"]]
    if (above_zero and value <= 0) or math.isinf(value):
        raise ValueError(f"{given!r} is out of range; give a {what} above 0, such as {examples}.")
    return value


def format_rate(rate: float) -> str:
    """Return a rate in bits per second, with three digits.

    Example:
        >>> format_rate(12.5e6), format_rate(1.5e9), format_rate(math.inf)
        ('100 Mbit/s', '12 Gbit/s', 'unlimited')
    """
    bits = 8.0 * rate
    if math.isinf(bits):
        return "unlimited"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits >= 0.9995 * factor:
            return f"{bits / factor:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits, in the unit that fits.

    Example:
        >>> format_seconds(0.0123), format_seconds(5400), format_seconds(90.0)
        ('12.3 ms', '1.5 h', '90 s')
    """
    for unit, factor, most in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 600.0), ("min", 60.0, 3600.0)):
        if seconds < most:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 3600.0:.3g} h"
