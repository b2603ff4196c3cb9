"""The encoder on GPU: residuals of one rank and their use in a step, by Triton's kernels.

The device decides everything, in buffers that are allocated once: the selection, the message with its header, the
validity of all ranks' messages, and the reaction to an invalid one. The host queues the same kernels in every step and
never waits for them. It learns the outcome of a step one step later (:meth:`TritonEncoder.outcome`).
"""

from collections.abc import Sequence
from typing import Literal

import torch

from lightning_hetero.compression.encoder_protocol import Outcome
from lightning_hetero.compression.layout import Layout, Slot
from lightning_hetero.compression.selectors import SelectorState
from lightning_hetero.compression.triton_gpu import apply_kernels as applying
from lightning_hetero.compression.triton_gpu import encode_kernels as encoding
from lightning_hetero.compression.triton_gpu import launch
from lightning_hetero.compression.triton_gpu.chunks import BucketChunks
from lightning_hetero.compression.triton_gpu.launch import MAX_BLOCKS, OPTIONS
from lightning_hetero.compression.triton_gpu.message_reader import MessageReader
from lightning_hetero.compression.triton_gpu.message_writer import MessageWriter, value_views
from lightning_hetero.compression.triton_gpu.status import StatusReadback
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["TritonEncoder"]


class TritonEncoder:
    """Error feedback, selection and merging of one rank on its GPU, a :class:`~.encoder_protocol.DeviceEncoder`.

    Args:
        layout: places of the parameters.
        form: format of its messages.
        device: device of the residuals; a CPU works under Triton's interpreter.
        world_size: number of ranks.

    Raises:
        ValueError: if the model has too many blocks for 32-bit numbers.
    """

    deferred: Literal[True] = True

    def __init__(self, layout: Layout, form: MessageFormat, device: torch.device, world_size: int) -> None:
        if layout.num_blocks > MAX_BLOCKS:
            raise ValueError(
                f"the model has {layout.num_blocks} blocks of {layout.block} elements, and block top-k on GPU takes at "
                f"most {MAX_BLOCKS}. Use larger blocks: BlockTopK(block={2 * layout.block})."
            )
        self.layout, self.form, self.state = layout, form, SelectorState()
        self._world_size, self._tiling = world_size, launch.TILING
        self.residual = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.merged = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.touched = torch.zeros(layout.num_blocks, dtype=torch.bool, device=device)
        self._writer = MessageWriter(layout, form, device, self._tiling)
        self._reader = MessageReader(form, device, world_size, self._tiling)
        self._readback = StatusReadback(self._reader.status, world_size)
        self._chunks = BucketChunks(layout.block, self._tiling.chunk, device, layout.slots)
        self._used = torch.zeros(len(layout.slots), dtype=torch.int32, device=device)
        self._stamp = 0

    @property
    def scores(self) -> torch.Tensor:
        """Score of each block of the model."""
        return self._writer.scores

    @property
    def verdict(self) -> torch.Tensor:
        """On the device: 0 if the messages were merged, 1 if a gradient was not finite, 2 if a message is malformed."""
        return self._reader.verdict

    def reform(self, form: MessageFormat) -> None:
        """Send messages of another format from the next step on; the residual is kept."""
        self.form = form
        self._writer.reform(form)
        self._reader.reform(form)

    # sending

    def accumulate(self, slot: Slot, gradient: torch.Tensor, weight: float, *, hold: bool = False) -> bool:
        """Apply ``r += w g`` to one parameter, and score its blocks; the message flags values that are not finite.

        Args:
            slot: the parameter's place.
            gradient: flat; it must stay as it is until :meth:`deliver`.
            weight: factor of the gradient.
            hold: whether the parameter's residual waits for a later step if its gradient is all 0.
        """
        return self.accumulate_bucket((slot,), gradient, weight, hold=hold)

    def accumulate_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, hold: bool = False
    ) -> bool:
        """Do :meth:`accumulate` for the parameters of a bucket, whose gradients lie one after the other."""
        writer, tiling = self._writer, self._tiling
        self._stamp = self._stamp % MAX_BLOCKS + 1  # tells this call's marks of used parameters from earlier ones
        chunks = self._chunks.of(slots, flat.element_size())
        for part in chunks:
            encoding.accumulate[part.grid](
                flat, self.residual, writer.scores, writer.histogram, self._used, part.table, weight, self._stamp,
                BLOCK=self.layout.block, TILE=tiling.blocks, UNIT=part.unit, HOLD=hold, **OPTIONS,
            )  # fmt: skip
        for part in chunks if hold else ():
            encoding.hold[part.grid](
                writer.scores, writer.histogram, self._used, part.table, self._stamp, TILE=tiling.scores, **OPTIONS
            )
        return True

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> None:
        """Write the message of this step and subtract its values from the residual."""
        self._writer.write(message, self.residual, step=step, bucket=bucket, rank=rank)

    def give_up(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> None:
        """Do the same as :meth:`encode`: the device sets the flag."""
        self.encode(message, step=step, bucket=bucket, rank=rank)

    # receiving

    def receive(self, rows: torch.Tensor, *, rank: int, step: int, bucket: int = 0) -> None:
        """Check the messages of all ranks; merge them if all are valid, else add what was sent back to the residual.

        Args:
            rows: one message in each row; row ``rank`` is this rank's own.
            rank: this rank.
            step: number of the step.
            bucket: number of the message in the step.

        Raises:
            ValueError: if ``rows`` has another shape than all messages have.
        """
        form, world, size = self.form, self._world_size, self.form.num_bytes
        if rows.dtype != torch.uint8 or tuple(rows.shape) != (world, size) or not rows.is_contiguous():
            raise ValueError(
                f"{tuple(rows.shape)} bytes of {rows.dtype} were received in bucket {bucket}, where {world} messages "
                f"of {size} are due. Check that all ranks run the same code and settings."
            )
        flat, reader = rows.view(-1), self._reader
        reader.check(flat, step=step, bucket=bucket)
        value, scale = value_views(form, flat)
        tile, slots = self._tiling.blocks, -(-form.k // self._tiling.blocks)
        shape = {"BLOCK": self.layout.block, "TILE": tile, "INT8": form.value_dtype == "int8", **OPTIONS}
        self.touched.zero_()
        for peer in range(world):  # one launch after the other, so that sums are in the order of ranks
            applying.merge[(slots,)](
                reader.numbers, value, scale, self.merged, self.touched.view(torch.uint8), self.verdict, peer,
                size // 16, reader.pitch, form.k, **shape,
            )  # fmt: skip
        applying.take_back[(slots,)](
            self._writer.chosen, *value_views(form, rows[rank]), self.residual, self.verdict, form.k, **shape
        )
        self._readback.start(step=step, bucket=bucket)

    def deliver(self, slot: Slot, gradient: torch.Tensor, weight: float, *, scale: float, fill: float) -> None:
        """Write ``scale`` times the sum of one parameter in place of its gradient.

        If the step is skipped, the gradient is subtracted from the residual, up to one rounding, and becomes ``fill``.
        """
        self.deliver_bucket((slot,), gradient, weight, scale=scale, fill=fill)

    def deliver_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, scale: float, fill: float
    ) -> None:
        """Do :meth:`deliver` for the parameters of a bucket, whose gradients lie one after the other."""
        for part in self._chunks.of(slots, flat.element_size()):
            applying.deliver[part.grid](
                flat, self.residual, self.merged, self.verdict, part.table, weight, scale, fill,
                BLOCK=self.layout.block, TILE=self._tiling.scores, UNIT=part.unit, **OPTIONS,
            )  # fmt: skip

    def finish(self) -> None:
        """End the step: clear the sum; :attr:`touched` stays until the next step."""
        reader, tile = self._reader, self._tiling.blocks
        applying.wipe[(-(-self.form.k // tile), self._world_size)](
            reader.numbers, self.merged, self.verdict, reader.pitch, self.form.k, BLOCK=self.layout.block, TILE=tile,
            **OPTIONS,
        )  # fmt: skip

    def outcome(self) -> Outcome | None:
        """Return the outcome of the last step, ``None`` if it was returned before; wait until the device has it.

        All ranks have seen the same messages, so all raise in the same step.

        Raises:
            ValueError: naming rank and bucket of a malformed message. Nothing of that step was applied.
        """
        return self._readback.outcome()
