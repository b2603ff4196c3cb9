"""Log of rank 0: which plan runs, and why the policy keeps it, whenever that reason changes."""

import logging

from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.policies.base import Decision

__all__ = ["SplitLog"]

log = logging.getLogger("lightning_hetero")


HELD = 3
"""Sync rounds in a row for which a reason that was logged before must hold to be logged again."""


class SplitLog:
    """Log of the running plan and of the reasons to keep the split: the first one, and others when they replace it.

    Args:
        speaks: whether this rank logs.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self._said: set[str] = set()
        self._newest, self._seen, self._rounds = "", "", 0

    def adopted(self, entry: PlanEntry, whose: str = "plan") -> None:
        """Log which plan runs from which step on."""
        if self.speaks:
            log.info("%s from epoch %d step %d: %s", whose, entry.epoch, entry.step, entry.describe())

    def note_kept(self, decision: Decision) -> None:
        """Log why the split stays, if the kind of reason (the text before the first colon) is not the one logged last.

        A kind that was logged before has to hold for some rounds first, so that two reasons in turn fill no log.
        """
        if not self.speaks or decision.proposal is not None or decision.kept is None:
            return
        kind = decision.kept.partition(":")[0]
        self._rounds = self._rounds + 1 if kind == self._seen else 1
        self._seen = kind
        if kind != self._newest and (kind not in self._said or self._rounds >= HELD):
            self._said.add(kind)
            self._newest = kind
            log.info("the split stays: %s", decision.kept)
