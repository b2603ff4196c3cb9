"""Settings without effect in a run, as a value: their names, the reason, and what to do instead."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NoEffect", "merged"]


@dataclass(frozen=True)
class NoEffect:
    """Settings that were given and do nothing in this run.

    Args:
        settings: as they were given, such as ``"hysteresis=0.1"``.
        reason: why they do nothing.
        cure: what to do instead.
        loses: whether the user loses something that the settings promise.

    Example:
        >>> str(NoEffect(("replan=5",), "the split is fixed", "Leave it out"))
        'replan=5 has no effect: the split is fixed. Leave it out.'
    """

    settings: tuple[str, ...]
    reason: str
    cure: str
    loses: bool = False

    def __str__(self) -> str:
        verb = "has" if len(self.settings) == 1 else "have"
        return f"{', '.join(self.settings)} {verb} no effect: {self.reason}. {self.cure}."


def merged(found: Iterable[NoEffect]) -> list[NoEffect]:
    """Merge the settings with the same reason and cure into one entry.

    Example:
        >>> alone = ("there is one worker", "Start more")
        >>> [one.settings for one in merged([NoEffect(("staleness=1",), *alone), NoEffect(("policy='pid'",), *alone)])]
        [('staleness=1', "policy='pid'")]
    """
    by_reason: dict[tuple[str, str, bool], tuple[str, ...]] = {}
    for one in found:
        key = one.reason, one.cure, one.loses
        by_reason[key] = by_reason.get(key, ()) + one.settings
    return [NoEffect(settings, *key) for key, settings in by_reason.items() if settings]
