"""Log of rank 0: which plan runs, and why the policy keeps it (each reason once)."""

import logging

from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.policies.base import Decision

__all__ = ["SplitLog"]

log = logging.getLogger("lightning_hetero")


class SplitLog:
    """Log of the running plan and of the reasons to keep the split, each reason once.

    Args:
        speaks: whether this rank logs.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self._said: set[str] = set()

    def adopted(self, entry: PlanEntry, whose: str = "plan") -> None:
        """Log which plan runs from which step on."""
        if self.speaks:
            log.info("%s from epoch %d step %d: %s", whose, entry.epoch, entry.step, entry.describe())

    def note_kept(self, decision: Decision) -> None:
        """Log why the split stays, unless that kind of reason (the text before the first colon) was logged before."""
        if not self.speaks or decision.proposal is not None or decision.kept is None:
            return
        kind = decision.kept.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.info("the split stays: %s", decision.kept)
