"""Names in a list: found whatever their capitals, spaces and hyphens, or refused with the nearest ones."""

import re
from collections.abc import Iterable

from lightning_hetero.core.keywords import closest

__all__ = ["UnknownNameError", "find_name"]


class UnknownNameError(ValueError):
    """Name that is in no list; the message has the nearest ones and what is allowed."""


def find_name(kind: str, name: str, allowed: Iterable[str], listed: str = "") -> str:
    """Return the name as the list has it; capitals, spaces and hyphens do not matter.

    Args:
        kind: word for what is named, for the error.
        name: as it was given.
        allowed: the list.
        listed: sentence that says what is allowed; the whole list by default.

    Raises:
        UnknownNameError: if it is not in the list.

    Example:
        >>> find_name("device", "rtx-3090", ["RTX 3090", "A100"])
        'RTX 3090'
    """
    names = list(allowed)
    for candidate in names:
        if _plain(candidate) == _plain(name):
            return candidate
    listed = listed or f"Allowed are {', '.join(names)}."
    raise UnknownNameError(f"{kind} {name!r} is unknown.{closest(name, names)} {listed}")


def _plain(name: object) -> str:
    return re.sub(r"[\s_-]+", "", str(name)).lower()
