"""The encoder of :mod:`lightning_hetero.compression.encoder` with Numba's loops; the same messages and residuals."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from lightning_hetero.compression import numba_kernels as kernels
from lightning_hetero.compression.balance import ScoreBalance
from lightning_hetero.compression.encoder import BlockEncoder
from lightning_hetero.compression.layout import Layout, Slot
from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.wire import MessageFormat

__all__ = ["NumbaEncoder"]

SHARE = 1_048_576
"""Elements of a gradient for which a further thread is worth it."""


class NumbaEncoder(BlockEncoder):
    """Error feedback and block selection of one rank, one pass over memory for each gradient in float32.

    Gradients of other types take torch's way. The loops are compiled when the first encoder is made, and kept on disk.
    It uses as many threads as torch does (``torch.get_num_threads()``).

    Args:
        layout: where parameters lie.
        form: format of its messages.
        selector: a name of :data:`~lightning_hetero.compression.selectors.SELECT`.
        balance: factors of the scores of each parameter, ``None`` for plain magnitudes.
    """

    def __init__(
        self, layout: Layout, form: MessageFormat, selector: str = "exact", balance: ScoreBalance | None = None
    ) -> None:
        super().__init__(layout, form, selector, balance=balance)
        self._message: torch.Tensor | None = None
        self._threads: ThreadPoolExecutor | None = None
        _warm(layout.block)

    def accumulate(self, slot: Slot, gradient: torch.Tensor, weight: float, *, hold: bool = False) -> bool:
        """``r += w g`` for one parameter, and its scores; see :meth:`BlockEncoder.accumulate`."""
        if gradient.dtype != torch.float32:
            return super().accumulate(slot, gradient, weight, hold=hold)
        block, pieces = self.layout.block, self._pieces(slot)

        def one(begin: int, end: int) -> int:
            start = slot.start + begin
            return kernels.accumulate(  # type: ignore[no-any-return]
                self.residual.numpy()[start : slot.start + end],
                gradient.numpy()[begin:end],
                np.float32(weight),
                self.scores.numpy()[start // block : (slot.start + end) // block],
                block,
            )

        done = [one(*pieces[0])] if len(pieces) == 1 else list(self._pool().map(one, *zip(*pieces, strict=True)))
        finite = True
        for (begin, end), count in zip(pieces, done, strict=True):
            residual = self.residual[slot.start + begin : slot.start + begin + count]
            self._added.append((residual, gradient[begin : begin + count], weight))
            finite = finite and count == min(end, slot.numel) - begin
        if finite and hold and not gradient.any():
            self.scores[slot.start // block : (slot.start + slot.padded) // block] = 0.0
        return finite

    def _pieces(self, slot: Slot) -> list[tuple[int, int]]:
        """Begin and end of each thread's part of a parameter, in whole blocks."""
        block = self.layout.block
        threads = max(1, min(torch.get_num_threads(), slot.numel // SHARE))
        size = -(-slot.padded // (threads * block)) * block
        return [(begin, min(begin + size, slot.padded)) for begin in range(0, slot.padded, size)]

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), "lightning_hetero")
        return self._threads

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0) -> int:
        """Write the message of this step and take what it holds out of the residual; returns its number of blocks."""
        indices = self._select()
        blocks = self.residual.view(-1, self.layout.block).numpy()
        self.form.write_indices(message, indices)
        parts = self.form.value_parts(message, len(indices))
        if self.form.value_dtype == "float32":
            kernels.take_float32(blocks, indices, parts[0].numpy())
        elif self.form.value_dtype == "bfloat16":
            kernels.take_bfloat16(blocks, indices, _bits(parts[0]))
        else:
            kernels.take_int8(blocks, indices, parts[0].numpy(), _bits(parts[1]))
        self.form.write_header(message, len(indices), 0, bucket=bucket, step=step)
        self._message = message
        if self.balance is not None:
            self.balance.follow(indices, self.form.codec.decode(parts).numpy())
        return len(indices)

    def merge(self, packs: list[Pack]) -> None:
        """Add packs in the order of ranks to :attr:`merged`."""
        blocks = self.merged.view(-1, self.layout.block).numpy()
        for pack in packs:
            kernels.add_blocks(blocks, pack.indices.numpy(), pack.values.numpy())
            self.touched.append(pack.indices)

    def undo(self) -> None:
        """Leave the step out: take back what was sent, then the gradient, to one rounding."""
        if self._message is not None:
            pack = self.form.unpack(self._message)
            self._sent = pack.indices, pack.values
        super().undo()

    def finish(self) -> None:
        """The step is over."""
        self._message = None
        super().finish()


def _bits(values: torch.Tensor) -> np.ndarray:
    """Bfloat16 as uint16, which numpy has no other type for."""
    return values.view(torch.int16).numpy().view(np.uint16)


def _warm(block: int) -> None:
    """Compile all loops, so that no step has to."""
    r, indices = np.zeros((2, block), np.float32), np.zeros(1, np.int64)
    kernels.accumulate(r.ravel(), r.ravel(), np.float32(1.0), np.zeros(2, np.float32), block)
    kernels.take_float32(r, indices, np.zeros((1, block), np.float32))
    kernels.take_bfloat16(r, indices, np.zeros((1, block), np.uint16))
    kernels.take_int8(r, indices, np.zeros((1, block), np.int8), np.zeros(1, np.uint16))
    kernels.add_blocks(r, indices, np.zeros((1, block), np.float32))
