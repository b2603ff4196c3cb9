"""Execution of a controller's choices of density and staleness, the same on all ranks, with a log of changes."""

import logging
import math
from collections.abc import Sequence

from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.gradients.stale_averager import StaleAverager
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.link.bandwidth import LinkEstimate

__all__ = ["DensityControl"]

log = logging.getLogger("lightning_hetero")


class DensityControl:
    """Newest choice of a controller.

    Args:
        speaks: whether this rank logs changes.

    Attributes:
        choice: newest decision on the density, ``None`` before there is one.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.choice: DensityChoice | None = None

    def apply(
        self,
        choice: DensityChoice,
        stale: bool | None,
        blocks: BlockTopKAverager,
        staleness: StaleAverager | None,
        links: Sequence[LinkEstimate],
    ) -> None:
        """Set the density, and make messages stale or synchronous, from the next step on.

        Args:
            choice: choice of rank 0.
            stale: whether messages become stale; ``None`` to leave that as it is.
            blocks: averager that sends the messages.
            staleness: averager that can make them stale.
            links: rate estimate of each sender.
        """
        bound = self.choice is not None and self.choice.communication_bound
        before, self.choice = blocks.density, choice
        blocks.set_density(choice.density)
        moved = _delay(staleness, stale)
        if self.speaks and (choice.density != before or choice.communication_bound != bound or moved):
            rates = [link.rate or math.inf for link in links]
            log.log(
                logging.WARNING if choice.communication_bound else logging.INFO,
                "density %.3g -> %.3g: rank %d sends %.4g MB/s at the least; %s",
                before,
                choice.density,
                blocks.topology.clusters[rates.index(min(rates))][0],
                min(rates) / 1e6,
                choice.describe(),
            )


def _delay(staleness: StaleAverager | None, stale: bool | None) -> bool:
    """Make messages stale or synchronous; return whether that is a change."""
    if staleness is None or not staleness.limit or stale is None:
        return False
    staleness.control_externally(True)
    changed = stale != (staleness.stale_share > 0.0)
    if stale:
        staleness.make_all_stale()
    else:
        staleness.make_all_synchronous()
    return changed
