"""Residuals of one rank and what is done with them in a step, on GPU: the counterpart of ``BlockEncoder`` in Triton.

Selection, packing and the message's header are made on the device, in buffers that are allocated once. The headers of
all messages are read by the host once a step, because a malformed message has to raise.
"""

from typing import Any

import torch

from lightning_hetero.compression import kernels
from lightning_hetero.compression.layout import Layout, Slot
from lightning_hetero.compression.merging import BlockMerger
from lightning_hetero.compression.wire import MessageFormat

__all__ = ["TritonEncoder"]

TILE, ITERS = 128, 8
SCORES = 1024
MOST = 2**31 - 1
OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}


class TritonEncoder(BlockMerger):
    """Error feedback and block selection of one rank on its GPU.

    Args:
        layout: where parameters lie.
        form: format of its messages.
        device: where residuals live; a CPU works under Triton's interpreter.

    Raises:
        ValueError: if a parameter, or the model in blocks, is too large for 32-bit offsets.
    """

    def __init__(self, layout: Layout, form: MessageFormat, device: torch.device) -> None:
        if layout.num_blocks > MOST or any(slot.padded > MOST for slot in layout.slots):
            raise ValueError(
                f"a parameter has more than {MOST} elements, too many for block top-k on GPU. Split the parameter."
            )
        super().__init__(layout, form, device)
        self.residual = torch.zeros(layout.numel, device=device)
        self.scores = torch.zeros(layout.num_blocks, device=device)
        self._hist = torch.zeros(kernels.EXPONENTS, dtype=torch.int32, device=device)
        self._plan = torch.zeros(5, dtype=torch.int32, device=device)
        tiles = -(-layout.num_blocks // SCORES)
        self._above, self._edge = (torch.zeros(tiles, dtype=torch.int32, device=device) for _ in range(2))
        self._above_sum, self._edge_sum = (torch.zeros_like(self._above) for _ in range(2))
        self.reform(form)
        self._powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
        self._added: list[tuple[Slot, torch.Tensor, float]] = []
        self._message: torch.Tensor | None = None

    def reform(self, form: MessageFormat) -> None:
        """Send messages of another format from the next step on; what is in the residual stays there."""
        super().reform(form)
        device = self.residual.device
        self._chosen = torch.zeros(form.k, dtype=torch.int32, device=device)
        self._bits = torch.zeros(8 * form.index_bytes if form.bitmap else 0, dtype=torch.uint8, device=device)

    def accumulate(self, slot: Slot, gradient: torch.Tensor, weight: float, *, hold: bool = False) -> bool:
        """``r += w g`` for one parameter, and its scores; what is not finite is noticed in the message."""
        blocks = slot.padded // self.layout.block
        first = slot.start // self.layout.block
        residual = self.residual[slot.start : slot.start + slot.padded]
        scores = self.scores[first : first + blocks]
        grid = (-(-blocks // (TILE * ITERS)),)
        kernels.accumulate[grid](
            gradient, residual, scores, self._hist, weight, slot.numel, blocks,
            BLOCK=self.layout.block, TILE=TILE, ITERS=ITERS, **OPTIONS,
        )  # fmt: skip
        if hold:
            scores.mul_((gradient != 0).any())
        self._added.append((slot, gradient, weight))
        return True

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0) -> None:
        """Write the message of this step and take what it holds out of the residual."""
        form, n, block = self.form, self.layout.num_blocks, self.layout.block
        tiles = (len(self._above),)
        kernels.pick[(1,)](self._hist, self._plan, form.k, FINE=False, **OPTIONS)
        grid = (-(-n // (SCORES * ITERS)),)
        kernels.refine[grid](self.scores, self._hist, self._plan, n, TILE=SCORES, ITERS=ITERS, **OPTIONS)
        kernels.pick[(1,)](self._hist, self._plan, form.k, FINE=True, **OPTIONS)
        kernels.count[tiles](self.scores, self._plan, self._above, self._edge, n, TILE=SCORES, **OPTIONS)
        torch.cumsum(self._above, 0, dtype=torch.int32, out=self._above_sum)
        torch.cumsum(self._edge, 0, dtype=torch.int32, out=self._edge_sum)
        self._chosen.fill_(-1)
        kernels.place[tiles](
            self.scores, self._plan, self._above_sum, self._edge_sum, self._chosen, n, form.k, TILE=SCORES, **OPTIONS
        )
        message.zero_()
        parts = form.value_parts(message, form.k)
        index, counts = form.index_views(message)
        kernels.pack[(-(-form.k // TILE),)](
            self._chosen, self.residual, parts[0], parts[-1], index, counts, form.k,
            BLOCK=block, TILE=TILE, INT8=form.value_dtype == "int8", SEGMENTS=not form.bitmap, **OPTIONS,
        )  # fmt: skip
        number = (self._chosen >= 0).sum()
        if form.bitmap:
            self._write_bitmap(index)
        form.write_header(message, number, self._plan[4], step=step, bucket=bucket)
        self._message = message

    def _write_bitmap(self, places: torch.Tensor) -> None:
        self._bits.zero_()
        where = torch.where(self._chosen >= 0, self._chosen, len(self._bits) - 1).long()
        self._bits.scatter_add_(0, where, (self._chosen >= 0).to(torch.uint8))
        places.copy_((self._bits.view(-1, 8) * self._powers).sum(1, dtype=torch.uint8))

    def give_up(self, message: torch.Tensor, *, step: int, bucket: int = 0) -> None:
        """The same as :meth:`encode`: the flag comes from the device."""
        self.encode(message, step=step, bucket=bucket)

    def undo(self) -> None:
        """Leave the step out: take back what was sent, then the gradient, to one rounding."""
        if self._message is not None:
            pack = self.form.unpack(self._message)
            self.residual.view(-1, self.layout.block).index_add_(0, pack.indices, pack.values)
        for slot, gradient, weight in reversed(self._added):
            residual = self.residual[slot.start : slot.start + slot.numel]
            kernels.revert[(-(-slot.numel // SCORES),)](gradient, residual, weight, slot.numel, TILE=SCORES, **OPTIONS)

    def finish(self) -> None:
        """The step is over: forget what :meth:`undo` would need, and clear the merged blocks."""
        self._added, self._message = [], None
        super().finish()
