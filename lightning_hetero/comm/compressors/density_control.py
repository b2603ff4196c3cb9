"""Follow a controller's choices of density and staleness, the same on all ranks, and log what changes."""

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
        """Take a density, and let messages be stale or awaited, from the next step on.

        Args:
            choice: of rank 0.
            stale: whether messages are to be stale; ``None`` where nobody has decided on that.
            blocks: sends the messages.
            staleness: may let them be stale.
            links: estimate of the rate of each one that sends.
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
    """Let messages be stale or awaited; return whether that is a change."""
    if staleness is None or not staleness.limit or stale is None:
        return False
    staleness.control_externally(True)
    changed = stale != (staleness.stale_share > 0.0)
    if stale:
        staleness.make_all_stale()
    else:
        staleness.make_all_synchronous()
    return changed
