"""Numbers with units, as in ``100Mbit``, ``1ms`` and ``124M``; anything else is refused."""

import math
import re
from collections.abc import Sequence

from lightning_hetero.core.keywords import closest

__all__ = [
    "format_rate",
    "format_seconds",
    "parse_bytes",
    "parse_count",
    "parse_jitter",
    "parse_model",
    "parse_number",
    "parse_prices",
    "parse_rate",
    "parse_seconds",
]

NUMBER = r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
RATES = {f"{p}{unit}": factor / bits for unit, bits in (("bit", 8), ("B", 1)) for p, factor in PREFIXES.items()}
RATES |= {f"{prefix}bps": factor / 8 for prefix, factor in PREFIXES.items()}
SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Units in a second: dividing keeps ``50us`` the number that ``5e-05`` is."""
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
BYTES = {f"{prefix}B": factor for prefix, factor in PREFIXES.items()}
MOST_COUNT = 10**12
MOST_NUMBER = 1e9
"""Greatest seconds and prices; far beyond it, floating-point numbers overflow in what is computed from them."""


def parse_rate(text: object) -> float:
    """Return bytes per second; ``inf`` is a link without a limit.

    Raises:
        ValueError: if it is no rate with a unit.

    Example:
        >>> parse_rate("100Mbit"), parse_rate("1.5 GB/s"), parse_rate("inf")
        (12500000.0, 1500000000.0, inf)
    """
    if _written(text).lower() in ("inf", ".inf"):  # the second is YAML's
        return math.inf
    plain = re.sub(r"/s$", "", _written(text))
    allowed = "a rate from 1bit to 1000000Tbit a second, such as 100Mbit, 10Gbit or 12.5MB/s, or inf for no limit"
    return _in_range(_with_unit(plain, text, RATES, allowed), text, 0.125, 1.25e17, allowed)


def parse_seconds(text: object) -> float:
    """Return seconds.

    Raises:
        ValueError: if it is no time with a unit.

    Example:
        >>> parse_seconds("50us"), parse_seconds("1.5ms")
        (5e-05, 0.0015)
    """
    allowed = f"a time from 0s to {MOST_NUMBER:g}s, such as 50us, 1.5ms or 2s"
    value = _with_unit(_written(text), text, dict.fromkeys(SECONDS, 1.0), allowed)
    value /= SECONDS[re.sub(r"[^a-z]", "", re.sub(r"[eE][+-]?\d+", "", str(text)))]
    return _in_range(value, text, 0.0, MOST_NUMBER, allowed)


def parse_bytes(text: object) -> float:
    """Return a number of bytes.

    Raises:
        ValueError: if it is no number with a unit.

    Example:
        >>> parse_bytes("496MB")
        496000000.0
    """
    allowed = "a size from 1B to 1000000TB, such as 496MB or 1.5GB"
    return _in_range(_with_unit(_written(text), text, BYTES, allowed), text, 1.0, 1e18, allowed)


def parse_count(text: object, most: int = MOST_COUNT, least: int = 1) -> int:
    """Return a whole number.

    Args:
        text: as it was written.
        most: greatest one.
        least: least one.

    Raises:
        ValueError: if it is none, or out of the range.

    Example:
        >>> parse_count("123.6M"), parse_count("50k"), parse_count(64), parse_count("1_024")
        (123600000, 50000, 64, 1024)
    """
    shown = f"{most:g}" if most > 10**7 else str(most)
    examples = ", such as 50000, 50k, 124M or 1.3B" if most == MOST_COUNT else ""
    allowed = f"a whole number from {least} to {shown}{examples}"
    value = _in_range(_with_unit(_written(text), text, COUNTS, allowed), text, least, most, allowed)
    if abs(value - round(value)) > 1e-9 * value:
        raise ValueError(f"{text!r} is not a whole number; give {allowed}.")
    return round(value)


def parse_number(text: object, low: float = 0.0, high: float = MOST_NUMBER) -> float:
    """Return a plain number in a range.

    Raises:
        ValueError: if it is none, or out of the range.

    Example:
        >>> parse_number("1e-3"), parse_number(2)
        (0.001, 2.0)
    """
    allowed = f"a number from {low:g} to {high:g}"
    _refuse(text, allowed)
    if not re.fullmatch(NUMBER, _written(text)):
        raise ValueError(f"{text!r} is not a number; give {allowed}.")
    return _in_range(float(_written(text)), text, low, high, allowed)


def parse_model(text: str) -> float:
    """Return the bytes of all gradients of a model: ``params=124M`` in float32, or ``bytes=248MB``.

    Raises:
        ValueError: if it is neither.

    Example:
        >>> parse_model("params=124M"), parse_model("bytes=248MB")
        (496000000.0, 248000000.0)
    """
    name, separator, value = (part.strip() for part in text.partition("="))
    if name == "params" and separator:
        return 4.0 * parse_count(value)
    if name == "bytes" and separator:
        return parse_bytes(value)
    raise ValueError(f"{text!r} is no model.{closest(name, ['params', 'bytes'])} Give params=124M or bytes=248MB.")


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Return prices by device, of ``A100=4.10`` or, for all devices without a price, ``2.5``.

    Raises:
        ValueError: if one is no price.

    Example:
        >>> parse_prices(["A100=4.10", "2.5"])
        {'A100': 4.1, '*': 2.5}
    """
    found: dict[str, float] = {}
    for text in texts:
        name, separator, price = (part.strip() for part in text.rpartition("="))
        name = name if separator else "*"
        if not name or name.lower() in map(str.lower, found):
            what = f"a second price of {'all' if name == '*' else name}; give one" if name else "a price of no device"
            raise ValueError(f"--price {text}: this is {what}. Write A100=4.10, or 4.10 for all without a price.")
        try:
            found[name] = parse_number(price)
        except ValueError as error:
            raise ValueError(f"--price {text}: {error} Write A100=4.10, or 4.10 for all without a price.") from None
    return found


def parse_jitter(text: str) -> float:
    """Return a relative deviation.

    Raises:
        ValueError: if it is none, or above 1.

    Example:
        >>> parse_jitter("0.03")
        0.03
    """
    try:
        return parse_number(text, high=1.0)
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}, such as 0.03 for 3 %.") from None


def _written(text: object) -> str:
    """Return the text without spaces around it, and without the underscores that group digits in YAML and Python."""
    return re.sub(r"(?<=\d)_(?=\d)", "", str(text).strip())


def _refuse(given: object, allowed: str) -> None:
    """Refuse what has no place on any scale here, and say what is wrong with it."""
    text = str(given).strip().lower().replace("\u2212", "-")
    if isinstance(given, bool) or text in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(f"{given!r} is a truth value, not a number; give {allowed}.")
    if re.match(r"-\s*\.?(?:\d|inf)", text):
        raise ValueError(f"{given!r} is negative; give {allowed}.")
    if text.strip("+.") in ("inf", "infinity", "nan"):
        raise ValueError(f"{given!r} is not a finite number; give {allowed}.")


def _with_unit(text: str, given: object, units: dict[str, float], allowed: str) -> float:
    _refuse(given, allowed)
    match = re.fullmatch(rf"{NUMBER}\s*(?P<unit>[A-Za-z]*)", text)
    if not match:
        raise ValueError(f"{given!r} is not a number{'' if '' in units else ' with a unit'}; give {allowed}.")
    if not match["unit"] and "" not in units:
        raise ValueError(f"{given!r} has no unit; give {allowed}.")
    if match["unit"] not in units:
        near = closest(match["unit"], [name for name in units if name])
        raise ValueError(f"{given!r} has the unit {match['unit']}, which is unknown.{near} Give {allowed}.")
    return float(match["number"]) * units[match["unit"]]


def _in_range(value: float, given: object, low: float, high: float, allowed: str) -> float:
    if not low <= value <= high:
        raise ValueError(f"{given!r} is out of range; give {allowed}.")
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
