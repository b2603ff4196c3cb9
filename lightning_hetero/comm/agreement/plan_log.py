"""Say on rank 0 which plan runs, and why a policy keeps it: each reason once, so that nobody wonders what it does."""

import logging

from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.policies.base import Decision

__all__ = ["SplitLog"]

log = logging.getLogger("lightning_hetero")


class SplitLog:
    """Tell rank 0's log which plan runs, and why the split stays; each reason once.

    Args:
        speaks: whether this rank says them.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self._said: set[str] = set()

    def adopted(self, entry: PlanEntry, whose: str = "plan") -> None:
        """Say which plan runs from which step."""
        if self.speaks:
            log.info("%s from epoch %d step %d: %s", whose, entry.epoch, entry.step, entry.describe())

    def note_kept(self, decision: Decision) -> None:
        """Say why the split stays, if it does for a reason that is new: what stands before the first colon."""
        if not self.speaks or decision.proposal is not None or decision.kept is None:
            return
        kind = decision.kept.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.info("the split stays: %s", decision.kept)
