"""Notices to the user on rank 0, each given once."""

import logging
from collections.abc import Iterable

from lightning_hetero.core.no_effect import NoEffect, merged

__all__ = ["Notices"]

log = logging.getLogger("lightning_hetero")


class Notices:
    """Log of notices, with a memory of those given.

    Args:
        speaks: whether this rank logs.

    Example:
        >>> notices = Notices(speaks=True)
        >>> notices.say("one of two loaders is split"), notices.said
        (None, ['one of two loaders is split'])
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.said: list[str] = []

    def say(self, text: str, *, loses: bool = False) -> None:
        """Log a notice, unless it was given before.

        Args:
            text: a sentence or two.
            loses: whether the user loses something; the notice is then a warning.
        """
        if self.speaks and text not in self.said:
            self.said.append(text)
            log.log(logging.WARNING if loses else logging.INFO, "%s", text)

    def tell(self, found: Iterable[NoEffect]) -> None:
        """Log which settings have no effect, one line for each reason."""
        for one in merged(found):
            self.say(str(one), loses=one.loses)
