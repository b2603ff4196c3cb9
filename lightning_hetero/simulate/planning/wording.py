"""Words around names and numbers in the answers: articles, plurals, percentages, and names that fit a line."""

import unicodedata
from collections.abc import Hashable, Sequence

__all__ = ["check_name", "columns", "counted", "labels", "percent", "shortened", "with_article"]

VOWEL_SOUNDS = "AEFHILMNORSX8"
"""First characters of an abbreviation that is read letter by letter after "an", as in "an RTX 3090"."""
LONGEST = 40
UNREADABLE = ("Cc", "Cs", "Zl", "Zp")
"""Categories of Unicode that would break a line or move a terminal's cursor."""


def with_article(name: str) -> str:
    """Return a name after "a" or "an", by its sound.

    Example:
        >>> [with_article(name) for name in ("A100", "RTX6000", "T4", "P4", "server", "old one", "8 cores")]
        ['an A100', 'an RTX6000', 'a T4', 'a P4', 'a server', 'an old one', 'an 8 cores']
    """
    start = name[:1]
    letters = name[:1].isdigit() or not name[1:2].islower()  # A100 and RTX are spelled, Server is a word
    an = start.upper() in VOWEL_SOUNDS and not start.islower() if letters else start.lower() in "aeiou"
    an = an or (start.islower() and start in "aeiou")
    return f"{'an' if start and an else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    Example:
        >>> counted(1, "worker"), counted(0, "step"), counted(12, "core")
        ('1 worker', '0 steps', '12 cores')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(share: float) -> str:
    """Return a share in percent, in powers of ten where it has many digits.

    Example:
        >>> percent(0.235), percent(-0.0001), percent(-6.25e20)
        ('23.5%', '0.0%', '-6.25e+22%')
    """
    return f"{100.0 * share:.3g}%" if abs(share) >= 1e3 else f"{round(share, 3) + 0.0:.1%}"  # no -0.0 %


def check_name(name: object) -> str:
    """Return a name that fits in a line.

    Raises:
        ValueError: if it is empty, or has a character such as a line break.

    Example:
        >>> check_name("2nd server")
        '2nd server'
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"the name {name!r} is empty or no text; give one such as 'A100'.")
    wrong = [character for character in name if unicodedata.category(character) in UNREADABLE]
    if wrong:
        raise ValueError(
            f"the name {name!r} has the control character {wrong[0]!r}; give letters, digits, spaces and signs."
        )
    return name


def shortened(name: str) -> str:
    """Return a name of at most 40 characters, without its middle if it is longer.

    Example:
        >>> shortened("x" * 50 + "y")
        'xxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxy'
    """
    half = (LONGEST - 3) // 2
    return name if len(name) <= LONGEST else f"{name[:half]}...{name[half + 3 - LONGEST :]}"


def columns(text: str) -> int:
    """Return the columns that a text takes in a terminal.

    Example:
        >>> columns("A100"), columns("\u65e5\u672c")
        (4, 4)
    """
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(bool(unicodedata.combining(character)) for character in text)


def labels(kinds: Sequence[tuple[str, Hashable]]) -> list[str]:
    """Return a label for each worker; different devices of one name are numbered.

    Args:
        kinds: name of each worker, and what equal devices have in common.

    Example:
        >>> labels([("a", 1), ("b", 1), ("a", 2), ("a", 1)])
        ['a #1', 'b', 'a #2', 'a #1']
    """
    of_name: dict[str, dict[Hashable, int]] = {}
    for name, kind in kinds:
        own = of_name.setdefault(name, {})
        own.setdefault(kind, len(own) + 1)
    return [f"{name} #{of_name[name][kind]}" if len(of_name[name]) > 1 else name for name, kind in kinds]
