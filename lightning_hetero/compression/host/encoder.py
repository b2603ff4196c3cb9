"""The encoder on the host: residuals of one rank and their use in a step, by torch's operations.

Its results are those of :mod:`lightning_hetero.compression.reference`. It works in chunks that stay in the second-level
cache, and allocates every buffer of the model's size once.
"""

import importlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import numpy as np
import torch

from lightning_hetero.compression.host.merger import BlockMerger
from lightning_hetero.compression.layout import Layout, Slot, put_rows, split, take_rows
from lightning_hetero.compression.message_header import NON_FINITE
from lightning_hetero.compression.score_scaling import ScoreScaling
from lightning_hetero.compression.selectors import SELECT, Indices, SelectorState
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["TorchEncoder", "cpu_encoder", "needing_numba"]

log = logging.getLogger("lightning_hetero")

NUMBA_MIN_ELEMENTS = 1_000_000
"""Elements of a model from which on it is worth importing Numba and compiling its loops once."""


@checked_keywords
class TorchEncoder(BlockMerger):
    """Error feedback and block selection of one rank, a :class:`~.encoder_protocol.HostEncoder`.

    Args:
        layout: places of the parameters.
        form: format of its messages.
        selector: a name of :data:`~lightning_hetero.compression.selectors.SELECT`.
        dtype: type of residuals, float32, or float64 for models in float64.
        balance: factors of the scores of each parameter, ``None`` for plain magnitudes.

    Example:
        >>> layout = Layout.of([("weight", 40)], block=16)
        >>> encoder = TorchEncoder(layout, MessageFormat(3, 1, 16, "float32"))
        >>> encoder.accumulate(layout.slots[0], torch.arange(40.0), weight=0.5)
        True
        >>> message = torch.empty(encoder.form.num_bytes, dtype=torch.uint8)
        >>> encoder.encode(message, step=0)
        1
        >>> encoder.residual[16:32].abs().sum()
        tensor(0.)
    """

    deferred: Literal[False] = False
    chunk_elements = 262_144
    """Elements that are processed at a time: 1 MB in float32."""

    def __init__(
        self,
        layout: Layout,
        form: MessageFormat,
        selector: str = "exact",
        dtype: torch.dtype = torch.float32,
        balance: ScoreScaling | None = None,
    ) -> None:
        super().__init__(layout, form)
        self.selector, self.balance, self.state = selector, balance, SelectorState()
        self.residual = torch.zeros(layout.numel, dtype=dtype)
        self.scores = torch.zeros(layout.num_blocks, dtype=dtype)
        self._ones = torch.ones(layout.block, dtype=dtype)
        self._magnitudes = torch.empty(min(self.chunk_elements, layout.numel), dtype=dtype)
        self._added: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None

    # one step

    def accumulate(self, slot: Slot, gradient: torch.Tensor, weight: float, *, hold: bool = False) -> bool:
        """Apply ``r += w g`` to one parameter, and score its blocks.

        Args:
            slot: the parameter's place.
            gradient: flat; it must stay as it is until the step ends, because :meth:`undo` needs it.
            weight: factor of the gradient.
            hold: whether the parameter's residual waits for a later step if its gradient is all 0.

        Returns:
            ``False`` if the gradient is not finite; from the first such chunk on, it is not added.
        """
        block, largest = self.layout.block, 0.0
        for begin in range(0, slot.padded, self.chunk_elements):
            size = min(self.chunk_elements, slot.padded - begin)
            start = slot.start + begin
            residual, piece = self.residual[start : start + size], gradient[begin : begin + size]
            # One sum shows NaN and infinity before they enter the residual, which would keep them forever.
            total = float(piece.sum(dtype=None if piece.dtype == torch.float64 else torch.float32))
            if not np.isfinite(total):
                return False
            residual[: len(piece)].add_(piece, alpha=weight)
            self._added.append((residual[: len(piece)], piece, weight))
            magnitudes = torch.abs(residual, out=self._magnitudes[:size]).view(-1, block)
            torch.mv(magnitudes, self._ones, out=self.scores[start // block : (start + size) // block])
            if hold:
                largest = max(largest, float(piece.abs().max()))
        if hold and largest == 0.0:
            self._hold(slot)
        return True

    def _hold(self, slot: Slot) -> None:
        """Select no block of a parameter in this step."""
        self.scores[slot.start // self.layout.block : (slot.start + slot.padded) // self.layout.block] = 0.0

    def accumulate_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, hold: bool = False
    ) -> bool:
        """Do :meth:`accumulate` for the parameters of a bucket, whose gradients lie one after the other."""
        return all(self.accumulate(slot, gradient, weight, hold=hold) for slot, gradient in split(flat, slots))

    def _select(self) -> Indices:
        """Return the blocks of this step's message."""
        if self.balance is not None:
            for slot in self.layout.slots:
                begin, end = slot.start // self.layout.block, (slot.start + slot.padded) // self.layout.block
                self.scores[begin:end].mul_(self.balance.factors[slot.name])
        return self._largest(min(self.form.k, len(self.scores)))

    def _largest(self, k: int) -> Indices:
        return SELECT[self.selector](self.scores.numpy(), k, self.state)

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> int:
        """Write the message of this step and subtract its values from the residual; return its number of blocks."""
        indices = self._select()
        blocks = self.residual.view(-1, self.layout.block)
        where = torch.from_numpy(indices)
        chosen = take_rows(blocks, where)
        sent = self.form.write(message, indices, chosen, bucket=bucket, step=step, rank=rank).to(chosen.dtype)
        put_rows(blocks, where, chosen.sub_(sent))
        self._sent = (where, sent)
        if self.balance is not None:
            self.balance.follow(indices, sent.numpy())
        return len(indices)

    def give_up(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> None:
        """Write a message that flags this rank's gradient as not finite."""
        nothing = torch.zeros(0, self.layout.block, dtype=torch.float32)
        none = np.zeros(0, np.int64)
        self.form.write(message, none, nothing, bucket=bucket, step=step, rank=rank, flags=NON_FINITE)

    def undo(self) -> None:
        """Skip the step: add what was sent back to the residual, then subtract the gradient, up to one rounding."""
        if self._sent is not None:
            where, sent = self._sent
            self.residual.view(-1, self.layout.block).index_add_(0, where, sent)
        for residual, piece, weight in reversed(self._added):
            residual.add_(piece, alpha=-weight)

    def finish(self) -> None:
        """End the step: drop the state for :meth:`undo`, and clear the sum."""
        self._added, self._sent = [], None
        super().finish()


def needing_numba(module: str, numel: int) -> ModuleType | None:
    """Import a module that needs Numba; ``None`` where Numba is missing or unusable, or the model has few elements."""
    if numel < NUMBA_MIN_ELEMENTS or not find_spec("numba"):
        return None
    try:
        return importlib.import_module(module)
    except ImportError as error:  # for example, a Numba that does not support this numpy
        log.warning("Numba is installed and cannot be used, so compression goes without it: %s", error)
        return None


def cpu_encoder(
    layout: Layout,
    form: MessageFormat,
    selector: str = "exact",
    dtype: torch.dtype = torch.float32,
    *,
    balanced: bool = False,
) -> TorchEncoder:
    """Return the fastest encoder on CPU: Numba's loops where it is installed and the model is large."""
    balance = ScoreScaling(layout) if balanced else None
    module = needing_numba("lightning_hetero.compression.numba_jit.encoder", layout.numel)
    if module is not None and dtype == torch.float32:
        encoder: TorchEncoder = module.NumbaEncoder(layout, form, selector, balance)
        return encoder
    return TorchEncoder(layout, form, selector, dtype, balance)
