"""The encoder of :mod:`lightning_hetero.compression.host.encoder` with Numba's loops; same messages and residuals."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from lightning_hetero.compression.host.encoder import TorchEncoder
from lightning_hetero.compression.layout import Layout, Slot, split
from lightning_hetero.compression.message_header import HEADER_BYTES, MESSAGE_KIND, Bytes, Words, address
from lightning_hetero.compression.numba_jit import encode_kernels, receive_kernels
from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.score_scaling import ScoreScaling
from lightning_hetero.compression.selectors import Indices, Scores, at_least, exact
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["NumbaEncoder"]

KINDS = {"float32": encode_kernels.FLOAT32, "bfloat16": encode_kernels.BFLOAT16, "int8": encode_kernels.INT8}


class NumbaEncoder(TorchEncoder):
    """Error feedback and block selection of one rank, one pass over memory for each gradient in float32.

    Torch accumulates gradients of other types. The loops are compiled when the first encoder is made, and cached on
    disk. The encoder uses as many threads as torch does (``torch.get_num_threads()``).

    Args:
        layout: places of the parameters.
        form: format of its messages.
        selector: a name of :data:`~lightning_hetero.compression.selectors.SELECT`.
        balance: factors of the scores of each parameter, ``None`` for plain magnitudes.
    """

    elements_per_thread = 1_048_576
    """Elements of a gradient for which one more thread is worth it."""

    def __init__(
        self, layout: Layout, form: MessageFormat, selector: str = "exact", balance: ScoreScaling | None = None
    ) -> None:
        super().__init__(layout, form, selector, balance=balance)
        self._message: torch.Tensor | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._found = np.zeros(0, np.int64)
        self._arrays = self.residual.numpy(), self.scores.numpy()
        self._parts: dict[tuple[object, ...], list[Indices]] = {}
        self._reached: list[tuple[torch.Tensor, Indices, Indices, float]] = []
        _warm(layout.block)

    # one step

    def accumulate(self, slot: Slot, gradient: torch.Tensor, weight: float, *, hold: bool = False) -> bool:
        """Apply ``r += w g`` to one parameter, and score its blocks; see :meth:`TorchEncoder.accumulate`."""
        if gradient.dtype != torch.float32:
            return super().accumulate(slot, gradient, weight, hold=hold)
        return self.accumulate_bucket((slot,), gradient, weight, hold=hold)

    def accumulate_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, hold: bool = False
    ) -> bool:
        """Do :meth:`accumulate` for the parameters of a bucket, in one call."""
        if flat.dtype != torch.float32:
            return super().accumulate_bucket(slots, flat, weight, hold=hold)
        (r, scores), g, w, block = self._arrays, flat.numpy(), np.float32(weight), self.layout.block
        shares = self._shares(slots, len(g))

        def one(parts: Indices) -> bool:
            reached = np.zeros(len(parts), np.int64)
            self._reached.append((flat, parts, reached, weight))
            return bool(encode_kernels.accumulate(r, g, parts, w, scores, block, reached))

        # Every share is processed, whatever one of them finds: undo() needs to know how far each has come.
        finite = one(shares[0]) if len(shares) == 1 else all(list(self._pool().map(one, shares)))
        for slot, gradient in split(flat, slots) if finite and hold else ():
            if not gradient.any():
                self._hold(slot)
        return finite

    def _shares(self, slots: Sequence[Slot], size: int) -> list[Indices]:
        """Return each thread's parts of a bucket of ``size`` elements, in the format of ``accumulate``."""
        threads = max(min(torch.get_num_threads(), size // self.elements_per_thread), 1)
        key = (threads, *[slot.name for slot in slots])
        if key not in self._parts:
            block, parts, at = self.layout.block, [], 0
            most = max(-(-size // (threads * block)) * block, block)
            for slot in slots:
                parts += [
                    (slot.start + begin, at + begin, min(most, slot.numel - begin))
                    for begin in range(0, slot.numel, most)
                ]
                at += slot.numel
            rows = np.array(parts, np.int64).reshape(-1, 3)
            edges = np.searchsorted(rows[:, 1], most * np.arange(1, threads))
            self._parts[key] = np.split(rows, edges)
        return self._parts[key]

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), "lightning_hetero")
        return self._threads

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> int:
        """Write the message of this step and subtract its values from the residual; return its number of blocks."""
        form, data = self.form, message.numpy()
        indices = self._select()
        if form.bitmap:
            form.write_indices(message, indices)
        else:
            encode_kernels.number(data, indices, form.places_at)
        encode_kernels.take(self._arrays[0], indices, form.block, KINDS[form.value_dtype], data, *form.parts_at)
        form.write_header(message, len(indices), 0, place=address(rank, bucket), step=step, sums=_sums)
        self._message = message
        if self.balance is not None:
            self.balance.follow(indices, form.unpack(message).values.numpy())
        return len(indices)

    def _largest(self, k: int) -> Indices:
        if self.selector == "exact":
            return exact(self._arrays[1], k, self.state, self._at_least)
        return super()._largest(k)

    def _at_least(self, scores: Scores, threshold: float, most: int) -> Indices | None:
        """Find scores as :func:`~lightning_hetero.compression.selectors.at_least` does."""
        if threshold <= 0 or most >= len(scores):
            return at_least(scores, threshold, most)
        if len(self._found) != most + 1:
            self._found = np.zeros(most + 1, np.int64)
        count = encode_kernels.at_least(scores, np.float32(threshold), self._found)
        return None if count > most else self._found[:count].copy()

    # after the exchange

    def read(self, rows: torch.Tensor, *, step: int, bucket: int = 0) -> list[Pack] | None:
        """Return the packs of all ranks' messages; torch reads an invalid one again and reports the fault.

        Raises:
            ValueError: if a message is malformed.
        """
        packs: list[Pack] = []
        form = self.form
        usual = not form.bitmap and rows.dtype == torch.uint8 and rows.shape[1] == form.num_bytes
        for rank, row in enumerate(rows.numpy() if usual else ()):
            indices, values = np.empty(form.k, np.int64), np.empty((form.k, form.block), np.float32)
            count = receive_kernels.read(
                row, (MESSAGE_KIND, address(rank, bucket), step, form.fingerprint), form.segments,
                form.places_at, *form.parts_at, form.num_blocks, KINDS[form.value_dtype], indices, values,
            )  # fmt: skip
            if count < 0:
                break
            packs.append(Pack(torch.from_numpy(indices[:count]), torch.from_numpy(values[:count])))
        return packs if len(packs) == len(rows) else super().read(rows, step=step, bucket=bucket)

    def merge(self, packs: list[Pack]) -> None:
        """Add packs in the order of ranks to :attr:`merged`."""
        for pack in packs:
            receive_kernels.add_blocks(self.merged.numpy(), pack.indices.numpy(), pack.values.view(-1).numpy())
            self.written.append(pack.indices)

    def merge_sparse(self, packs: list[Pack]) -> Pack:
        """Return the sum of packs as one pack, see :func:`~lightning_hetero.compression.reference.merge_sparse`."""
        union = packs[0].indices.numpy()
        for pack in packs[1:]:
            both = np.empty(len(union) + len(pack.indices), np.int64)
            union = both[: receive_kernels.unite(union, pack.indices.numpy(), both)]
        values = np.zeros((len(union), self.layout.block), np.float32)
        for pack in packs:
            receive_kernels.fold(union, values, pack.indices.numpy(), pack.values.numpy())
        return Pack(torch.from_numpy(union), torch.from_numpy(values))

    def undo(self) -> None:
        """Skip the step: add what was sent back to the residual, then subtract the gradient, up to one rounding."""
        if self._message is not None:
            pack = self.form.unpack(self._message)
            self._sent = pack.indices, pack.values
        for flat, parts, reached, weight in self._reached:
            for (to, at, _), size in zip(parts.tolist(), reached.tolist(), strict=True):
                self._added.append((self.residual[to : to + size], flat[at : at + size], weight))
        super().undo()

    def finish(self) -> None:
        """End the step: drop the state for :meth:`undo`, and clear the sum."""
        self._message, self._reached = None, []
        super().finish()


def _sums(payload: Bytes, _: Words) -> tuple[int, int]:
    first, second = receive_kernels.checksum(payload)
    return int(first), int(second)


def _warm(block: int) -> None:
    """Compile all loops before the first step."""
    r, g = np.zeros(16 * block, np.float32), np.zeros(16 * block, np.float32)
    part, index, values = np.zeros((1, 3), np.int64), np.zeros(1, np.int64), np.zeros((1, block), np.float32)
    encode_kernels.accumulate(r, g, part, np.float32(1.0), np.zeros(16, np.float32), block, part[0])
    encode_kernels.at_least(r, np.float32(1.0), np.zeros(1, np.int64))
    form = MessageFormat(16, 1, block, "float32")
    message, kind = np.zeros(form.num_bytes, np.uint8), encode_kernels.FLOAT32
    encode_kernels.number(message, index, form.places_at)
    encode_kernels.take(r, index, block, kind, message, *form.parts_at)
    due = MESSAGE_KIND, 0, 0, form.fingerprint
    receive_kernels.read(message, due, 1, form.places_at, *form.parts_at, 16, kind, index, values)
    receive_kernels.checksum(message[HEADER_BYTES:])
    receive_kernels.unite(index, index, np.zeros(2, np.int64))
    receive_kernels.fold(index, values, index, values)
    receive_kernels.add_blocks(r, index, values.ravel())
