"""Residuals of one rank and what is done with them in a step, on GPU: the counterpart of ``BlockEncoder`` in Triton.

Everything is decided on the device, in buffers that are allocated once: selection, the message with its header, whether
the messages of all ranks are in order, and what is done if one is not. The host queues the same kernels in every step
and never waits for them. What became of a step it learns a step later (:meth:`TritonEncoder.outcome`).
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_hetero.compression.encoder_protocol import Outcome
from lightning_hetero.compression.layout import Layout, Slot
from lightning_hetero.compression.message_header import HEADER_BYTES, MAGIC, foreign, refusal
from lightning_hetero.compression.selectors import SelectorState
from lightning_hetero.compression.triton_gpu import apply_kernels as applying
from lightning_hetero.compression.triton_gpu import encode_kernels as kernels
from lightning_hetero.compression.triton_gpu import receive_kernels as receiving
from lightning_hetero.compression.triton_gpu.chunks import BucketChunks
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["TritonEncoder"]

TILE, ITERS = 128, 8
SCORES = 1024
MOST = 2**31 - 2**20
"""Blocks of a model: their numbers, and those of a program beyond the last, have to fit into 32 bits."""

OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": False}
EIGHT_WARPS: Any = {**OPTIONS, "num_warps": 8}
"""For kernels that would take more than 64 registers with four."""


class TritonEncoder:
    """Error feedback, block selection, and merging of one rank on its GPU.

    Args:
        layout: where parameters lie.
        form: format of its messages.
        device: where residuals live; a CPU works under Triton's interpreter.
        world_size: number of ranks.

    Raises:
        ValueError: if the model has too many blocks for 32-bit numbers.
    """

    deferred: Literal[True] = True

    def __init__(self, layout: Layout, form: MessageFormat, device: torch.device, world_size: int) -> None:
        if layout.num_blocks > MOST:
            raise ValueError(
                f"the model has {layout.num_blocks} blocks of {layout.block} elements, and block top-k on GPU takes at "
                f"most {MOST}. Use larger blocks: BlockTopK(block={2 * layout.block})."
            )

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.layout, self.world_size, self.state = layout, world_size, SelectorState()
        self.residual = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        tiles = max(1, -(-layout.num_blocks // SCORES))  # one for a model of empty parameters, too
        self._scores = torch.zeros(-(-tiles // ITERS) * ITERS * SCORES, dtype=torch.float32, device=device)
        self.scores = self._scores[: layout.num_blocks]
        self.merged = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.touched = torch.zeros(layout.num_blocks, dtype=torch.bool, device=device)
        self._hist, self._plan = integers(kernels.EXPONENTS), integers(5)
        self._above, self._edge, self._above_ends, self._edge_ends = (integers(tiles) for _ in range(4))
        self.reform(form)
        self._sums = integers(world_size, 2, dtype=torch.int64)
        self._status = integers(3 * world_size + 1)
        self._chunks = BucketChunks(layout.block, TILE * ITERS, device, layout.slots)
        self._used, self._stamp = integers(len(layout.slots)), 0
        on_gpu = device.type == "cuda"
        self._seen = torch.zeros(3 * world_size + 1, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._unread: tuple[int, int] | None = None

    @property
    def verdict(self) -> torch.Tensor:
        """On the device: 0 if the messages were merged, 1 if a gradient was not finite, 2 if a message is malformed."""
        return self._status[3 * self.world_size]

    # sending

    def reform(self, form: MessageFormat) -> None:
        """Send messages of another format from the next step on; what is in the residual stays there."""
        self.form, world = form, self.world_size
        counts = max(1, -(-8 * form.index_bytes // SCORES) if form.bitmap else form.segments)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.residual.device)

        # Rows of what kernels read four numbers at a time begin at multiples of 16 bytes, which strides count.
        self._stride, self._pitch, self._counts_pitch = form.num_bytes // 16, -(-form.k // 4), -(-counts // 4)
        self._chosen, self._numbers = integers(form.k).fill_(-1), integers(world, 4 * self._pitch)
        self._counts, self._ends = integers(world, 4 * self._counts_pitch), integers(world, counts)
        self._fingerprint = form.fingerprint - (form.fingerprint >> 31 << 32)  # with a sign: 32 bits in any case

    def accumulate(self, slot: Slot, gradient: torch.Tensor, weight: float, *, hold: bool = False) -> bool:
        """``r += w g`` for one parameter, and its scores; what is not finite is noticed in the message.

        Args:
            slot: the parameter's place.
            gradient: flat; it must stay as it is until :meth:`deliver`.
            weight: what the gradient is multiplied by.
            hold: whether the parameter's residual waits for another step if its gradient is all 0.
        """
        return self.accumulate_bucket((slot,), gradient, weight, hold=hold)

    def accumulate_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, hold: bool = False
    ) -> bool:
        """:meth:`accumulate` for the parameters of a bucket, whose gradients lie one after the other."""
        self._stamp = self._stamp % MOST + 1
        chunks = self._chunks.of(slots, flat.element_size())
        for part in chunks:
            kernels.accumulate[part.grid](
                flat, self.residual, self.scores, self._hist, self._used, part.table, weight, self._stamp,
                BLOCK=self.layout.block, TILE=TILE, UNIT=part.unit, HOLD=hold, **OPTIONS,
            )  # fmt: skip
        for part in chunks if hold else ():
            kernels.hold[part.grid](
                self.scores, self._hist, self._used, part.table, self._stamp, TILE=SCORES, **OPTIONS
            )
        return True

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> None:
        """Write the message of this step and take what it holds out of the residual."""
        form, scores, tiles = self.form, self._scores, len(self._above)
        kernels.pick[(1,)](self._hist, self._plan, form.k, FINE=False, **OPTIONS)
        grid = (-(-tiles // ITERS),)
        kernels.refine[grid](scores, self._hist, self._plan, TILE=SCORES, ITERS=ITERS, **OPTIONS)
        kernels.pick[(1,)](self._hist, self._plan, form.k, FINE=True, **OPTIONS)
        kernels.count[(tiles,)](scores, self._plan, self._above, self._edge, TILE=SCORES, **OPTIONS)
        for counts, ends in ((self._above, self._above_ends), (self._edge, self._edge_ends)):
            receiving.prefix[(1,)](counts, ends, tiles, 0, TILE=SCORES, **OPTIONS)
        self._chosen.fill_(-1)
        kernels.place[(tiles,)](
            scores, self._plan, self._above_ends, self._edge_ends, self._chosen, form.k, TILE=SCORES, **EIGHT_WARPS
        )
        message.zero_()
        index, counts = form.index_views(message)
        value, scale = self._parts(message)
        kernels.pack[(-(-form.k // TILE),)](
            self._chosen, self.residual, value, scale, index.view(torch.int32) if form.bitmap else index, counts,
            form.k, BLOCK=self.layout.block, TILE=TILE, INT8=self._int8, SEGMENTS=not form.bitmap, **EIGHT_WARPS,
        )  # fmt: skip
        self._take_sums(message, 1)
        receiving.seal[(1,)](
            message[:HEADER_BYTES].view(torch.int64), self._sums, self._plan, self._above_ends, self._edge_ends, tiles,
            form.k, rank, bucket, step, self._fingerprint, **OPTIONS,
        )  # fmt: skip

    def give_up(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> None:
        """The same as :meth:`encode`: the flag comes from the device."""
        self.encode(message, step=step, bucket=bucket, rank=rank)

    @property
    def _int8(self) -> bool:
        return self.form.value_dtype == "int8"

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of a message; values again where there are no scales."""
        parts = self.form.value_parts(message, self.form.k)
        return parts[0], parts[-1]

    def _take_sums(self, rows: torch.Tensor, number: int) -> None:
        units = (self.form.num_bytes - HEADER_BYTES) // 16
        receiving.word_sums[(-(-4 * units // (SCORES * ITERS)), number)](
            rows.view(-1).view(torch.int32), self._sums, units, self._stride, TILE=SCORES, ITERS=ITERS, **EIGHT_WARPS
        )

    # receiving

    def receive(self, rows: torch.Tensor, *, rank: int, step: int, bucket: int = 0) -> None:
        """Check the messages of all ranks; merge them if all are in order, and take back what was sent if not.

        Args:
            rows: one message in each row; this rank's own is its own.
            rank: this rank.
            step: number of the step.
            bucket: number of the message in the step.

        Raises:
            ValueError: if ``rows`` has another shape than all messages have.
        """
        form, world, size = self.form, self.world_size, self.form.num_bytes
        if rows.dtype != torch.uint8 or tuple(rows.shape) != (world, size) or not rows.is_contiguous():
            raise ValueError(
                f"{tuple(rows.shape)} bytes of {rows.dtype} were received in bucket {bucket}, where {world} messages "
                f"of {size} are due. Check that all ranks run the same code and settings."
            )
        flat = rows.view(-1)
        self._inspect(flat, step=step, bucket=bucket)
        value, scale = self._parts(flat)
        shape = {"BLOCK": self.layout.block, "TILE": TILE, "INT8": self._int8, **OPTIONS}
        slots, verdict = -(-form.k // TILE), self.verdict
        receiving.check[(slots, world)](
            self._numbers, self._status, value, scale, self._stride, self._pitch, self.layout.num_blocks, world, **shape
        )
        receiving.decide[(1,)](self._status, world, WIDTH=1 << (world - 1).bit_length(), **OPTIONS)
        self.touched.zero_()
        for peer in range(world):
            applying.merge[(slots,)](
                self._numbers, value, scale, self.merged, self.touched.view(torch.uint8), verdict, peer, self._stride,
                self._pitch, form.k, **shape,
            )  # fmt: skip
        applying.take_back[(slots,)](self._chosen, *self._parts(rows[rank]), self.residual, verdict, form.k, **shape)
        self._seen.copy_(self._status, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._unread = step, bucket

    def _inspect(self, flat: torch.Tensor, *, step: int, bucket: int) -> None:
        """Headers into the status, and the numbers of the blocks."""
        form, world, stride = self.form, self.world_size, self._stride
        self._take_sums(flat, world)
        places, counts = form.index_views(flat)
        counts_stride, length = stride, self._ends.shape[1]
        if form.bitmap:
            words, bits = places.view(torch.int32), 8 * form.index_bytes
            counts, counts_stride = self._counts, self._counts_pitch
            receiving.tally[(length, world)](words, counts, stride, counts_stride, bits, TILE=SCORES, **OPTIONS)
        receiving.prefix[(world,)](counts, self._ends, length, counts_stride, TILE=SCORES, **OPTIONS)
        receiving.inspect[(world,)](
            flat.view(torch.int64), self._sums, counts, self._ends, self._status, stride, counts_stride, length,
            form.k, world, bucket, step, self._fingerprint, TILE=SCORES, **OPTIONS,
        )  # fmt: skip
        if form.bitmap:
            self._numbers.fill_(-1)
            receiving.spread[(length, world)](
                words, self._ends, self._status, self._numbers, stride, self._pitch, bits, form.k,
                TILE=SCORES, **OPTIONS,
            )  # fmt: skip
        else:
            receiving.expand[(-(-form.k // TILE), world)](
                places, self._ends, self._status, self._numbers, stride, self._pitch, length, length.bit_length(),
                form.k, world, TILE=TILE, **OPTIONS,
            )  # fmt: skip

    def deliver(self, slot: Slot, gradient: torch.Tensor, weight: float, *, scale: float, fill: float) -> None:
        """``scale`` times the sum of one parameter, in place of its gradient.

        If the step is left out, the gradient goes out of the residual again, to one rounding, and becomes ``fill``.
        """
        self.deliver_bucket((slot,), gradient, weight, scale=scale, fill=fill)

    def deliver_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, scale: float, fill: float
    ) -> None:
        """:meth:`deliver` for the parameters of a bucket, whose gradients lie one after the other."""
        for part in self._chunks.of(slots, flat.element_size()):
            applying.deliver[part.grid](
                flat, self.residual, self.merged, self.verdict, part.table, weight, scale, fill,
                BLOCK=self.layout.block, TILE=SCORES, UNIT=part.unit, **OPTIONS,
            )  # fmt: skip

    def finish(self) -> None:
        """The step is over: clear the merged blocks. :attr:`touched` stays until the next one."""
        applying.wipe[(-(-self.form.k // TILE), self.world_size)](
            self._numbers, self.merged, self.verdict, self._pitch, self.form.k, BLOCK=self.layout.block, TILE=TILE,
            **OPTIONS,
        )  # fmt: skip

    def outcome(self) -> Outcome | None:
        """What became of the last step, ``None`` if that was asked before; waits for the device to have reached it.

        All ranks have seen the same messages, so that all raise in the same step.

        Raises:
            ValueError: naming rank and bucket of a malformed message. Nothing of that step was applied.
        """
        if self._unread is None:
            return None
        (step, bucket), self._unread = self._unread, None
        if self._copied is not None:
            self._copied.synchronize()
        status, world = self._seen.tolist(), self.world_size
        for rank, code in enumerate(status[:world]):
            if code:
                raise refusal(_faults(code), rank=rank, bucket=bucket, step=step)
        verdict = status[3 * world]
        return Outcome(step, bool(verdict), 0 if verdict else sum(status[world : 2 * world]))


def _faults(code: int) -> str:
    """What is wrong with a message."""
    if code & 1:
        its_version = code >> receiving.VERSION_AT
        return foreign(MAGIC | its_version if its_version else 0)
    return "; ".join(text for bit, text in receiving.FAULTS.items() if code & bit)
