"""Says on rank 0 why a policy keeps the split: each reason once, so that nobody wonders whether it does anything."""

import logging

from lightning_hetero.core.proposal import Decision

__all__ = ["KeptSplit"]

log = logging.getLogger("lightning_hetero")


class KeptSplit:
    """Remembers which reasons were said.

    Args:
        speaks: whether this rank says them.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self._said: set[str] = set()

    def see(self, decision: Decision) -> None:
        """Say why the split stays, if it does for a reason that is new: what stands before the first colon."""
        if not self.speaks or decision.proposal is not None or decision.kept is None:
            return
        kind = decision.kept.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.info("the split stays: %s", decision.kept)
