"""Whether compressed messages are awaited or come a step later: quick back to waiting, slow to delays."""

from dataclasses import dataclass

__all__ = ["LateChoice"]

GAIN, LEAST = 0.05, 0.01
"""Least predicted gain for which messages come a step later, and the one below which they are awaited again."""

LOOKS = 3
"""Looks in a row that have to speak for a delay."""

SAME_LINK = 1.5
"""Factor within which the link's rate is the same: a turn is not taken back on it."""


@dataclass(frozen=True)
class LateChoice:
    """What spoke for a delay so far.

    Args:
        looks: looks in a row that spoke for it.
        rate: of the link, bytes per second, when messages turned last; ``None`` if they never did.

    Example:
        >>> choice = LateChoice()
        >>> for _ in range(3):
        ...     choice, late = choice.look(False, fresh=1.0, late=0.8, rate=1e6)
        >>> late
        True
        >>> choice.look(True, fresh=0.8, late=1.0, rate=1e6)[1], choice.look(True, fresh=0.8, late=1.0, rate=9e6)[1]
        (True, False)
    """

    looks: int = 0
    rate: float | None = None

    def look(self, now: bool, fresh: float, late: float, rate: float) -> tuple["LateChoice", bool]:
        """One more look.

        Args:
            now: whether messages come a step later at present.
            fresh: predicted time to accuracy if they are awaited, at the density that suits that best.
            late: the same if they come a step later.
            rate: bytes per second that the link is believed to carry.

        Returns:
            What is known now, and whether messages are to come a step later.
        """
        gain = 1.0 - late / fresh
        same = self.rate is not None and 1 / SAME_LINK < rate / self.rate < SAME_LINK
        if now:
            back = gain < LEAST and not same
            return (LateChoice(0, rate), False) if back else (self, True)
        looks = self.looks + 1 if gain > GAIN and not same else 0
        return (LateChoice(0, rate), True) if looks >= LOOKS else (LateChoice(looks, self.rate), False)
