"""Merging on the host: read all ranks' messages, add them up, clear the sum."""

from functools import cached_property

import torch

from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.reference import Pack, merge_sparse
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["BlockMerger"]


class BlockMerger:
    """Sum of all ranks' blocks, in a buffer of the model's size in which only touched blocks are written.

    Args:
        layout: places of the parameters.
        form: format of the messages.
    """

    residual: torch.Tensor

    def __init__(self, layout: Layout, form: MessageFormat) -> None:
        self.layout, self.form = layout, form
        self.written: list[torch.Tensor] = []
        """Numbers of the blocks that were added to the sum in this step."""

    @cached_property
    def merged(self) -> torch.Tensor:
        """The sum, 0 where nothing was sent; allocated on first use, which sparse steps do not need."""
        return torch.zeros(self.layout.numel, dtype=torch.float32)

    def reform(self, form: MessageFormat) -> None:
        """Send messages of another format from the next step on; the residual is kept."""
        self.form = form

    def read(self, rows: torch.Tensor, *, step: int, bucket: int = 0) -> list[Pack] | None:
        """Return the packs of all ranks' messages; ``None`` if a rank says that its gradient is not finite.

        Raises:
            ValueError: if a message is malformed; all are checked before any is applied.
        """
        packs = [self.form.read(row, rank=rank, bucket=bucket, step=step) for rank, row in enumerate(rows)]
        return None if any(flags for _, flags in packs) else [pack for pack, _ in packs]

    def merge(self, packs: list[Pack]) -> None:
        """Add packs in the order of ranks to :attr:`merged`."""
        blocks = self.merged.view(-1, self.layout.block)
        for pack in packs:
            blocks.index_add_(0, pack.indices, pack.values)
            self.written.append(pack.indices)

    def merge_sparse(self, packs: list[Pack]) -> Pack:
        """Return the sum of packs, in the order of ranks, as one pack."""
        return merge_sparse(packs)

    def take_back(self, message: torch.Tensor) -> None:
        """Add the values of this rank's message back to the residual, because no rank has applied it."""
        pack = self.form.unpack(message)
        self.residual.view(-1, self.layout.block).index_add_(0, pack.indices, pack.values.to(self.residual.dtype))

    def finish(self) -> None:
        """End the step: clear the blocks of the sum that were written."""
        for where in self.written:
            self.merged.view(-1, self.layout.block).index_fill_(0, where, 0.0)
        self.written = []
