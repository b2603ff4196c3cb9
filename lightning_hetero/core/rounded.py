"""Numbers in log lines: rounded, and never in powers of ten."""

__all__ = ["rounded"]


def rounded(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and with all digits before the point if these are more.

    Args:
        value: number, below ``1e16`` in magnitude; NaN and infinity keep their names.
        digits: significant digits of a smaller number.

    Example:
        >>> rounded(0.012345), rounded(12345.6), rounded(82.114, 4), rounded(-999.9)
        ('0.0123', '12346', '82.11', '-1000')
    """
    return f"{value:.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"
