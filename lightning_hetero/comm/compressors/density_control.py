"""Execution of a controller's choices of density, the same on all ranks, with a log of changes."""

import logging
from collections.abc import Sequence

from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.core.compression.objective import DensityChoice

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

    def apply(self, choice: DensityChoice, blocks: BlockTopKAverager, rates: Sequence[float]) -> None:
        """Set the density from the next step on.

        Args:
            choice: choice of rank 0.
            blocks: averager that sends the messages.
            rates: bytes per second of each sender.
        """
        bound = self.choice is not None and self.choice.communication_bound
        before, self.choice = blocks.density, choice
        blocks.set_density(choice.density)
        if self.speaks and rates and (choice.density != before or choice.communication_bound != bound):
            log.log(
                logging.WARNING if choice.communication_bound else logging.INFO,
                "density %.3g -> %.3g: rank %d sends %.4g MB/s at the least; %s",
                before,
                choice.density,
                blocks.topology.clusters[rates.index(min(rates))][0],
                min(rates) / 1e6,
                choice.describe(),
            )
