"""Messages of all ranks on the device: their check, the numbers of their blocks, and one verdict on the step."""

import torch

from lightning_hetero.compression.triton_gpu import header_kernels as headers
from lightning_hetero.compression.triton_gpu import receive_kernels as receiving
from lightning_hetero.compression.triton_gpu.launch import OPTIONS, Tiling
from lightning_hetero.compression.triton_gpu.message_writer import signed_fingerprint, sum_words, value_views
from lightning_hetero.compression.triton_gpu.status import status_length
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["MessageReader"]


class MessageReader:
    """Status of all ranks' messages, and the numbers of their blocks.

    Args:
        form: format of the messages.
        device: device on which they arrive.
        world_size: number of ranks.
        tiling: sizes of the parts that a program processes.
    """

    def __init__(self, form: MessageFormat, device: torch.device, world_size: int, tiling: Tiling) -> None:
        self._device, self._world_size, self._tiling = device, world_size, tiling
        self._sums = torch.zeros(world_size, 2, dtype=torch.int64, device=device)
        self.status = self._integers(status_length(world_size))
        self.reform(form)

    def _integers(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    @property
    def verdict(self) -> torch.Tensor:
        """On the device: 0 if all is valid, 1 if a gradient was not finite, 2 if a message is malformed."""
        return self.status[-1]

    def reform(self, form: MessageFormat) -> None:
        """Read messages of another format from the next step on."""
        self._form, world = form, self._world_size
        counts = max(1, -(-8 * form.index_bytes // self._tiling.scores) if form.bitmap else form.segments)
        # Kernels read four numbers at a time, so rows begin at multiples of 16 bytes, the unit of strides.
        self.pitch, self._counts_pitch = -(-form.k // 4), -(-counts // 4)
        self.numbers = self._integers(world, 4 * self.pitch)
        """Numbers of the blocks of each message, -1 in empty slots; only the first ``k`` of each row count."""
        self._counts, self._ends = self._integers(world, 4 * self._counts_pitch), self._integers(world, counts)

    def check(self, rows: torch.Tensor, *, step: int, bucket: int) -> None:
        """Write the status and the numbers of the blocks of all messages, and the verdict.

        Args:
            rows: all messages, flat, one after the other.
            step: number of the step.
            bucket: number of the message in the step.
        """
        form, world, stride, tiling = self._form, self._world_size, self._form.num_bytes // 16, self._tiling
        self._inspect(rows, stride, step=step, bucket=bucket)
        value, scale = value_views(form, rows)
        receiving.check[(-(-form.k // tiling.blocks), world)](
            self.numbers, self.status, value, scale, stride, self.pitch, form.num_blocks, world,
            BLOCK=form.block, TILE=tiling.blocks, INT8=form.value_dtype == "int8", **OPTIONS,
        )  # fmt: skip
        receiving.decide[(1,)](self.status, world, WIDTH=1 << (world - 1).bit_length(), **OPTIONS)

    def _inspect(self, rows: torch.Tensor, stride: int, *, step: int, bucket: int) -> None:
        """Write the results of the header checks to the status, and the numbers of the blocks."""
        form, world, tiling = self._form, self._world_size, self._tiling
        sum_words(form, rows, self._sums, tiling)
        places, counts = form.index_views(rows)
        counts_stride, length = stride, self._ends.shape[1]
        words, bits = rows, 8 * form.index_bytes
        if form.bitmap:
            words = places.view(torch.int32)
            counts, counts_stride = self._counts, self._counts_pitch
            receiving.tally[(length, world)](words, counts, stride, counts_stride, bits, TILE=tiling.scores, **OPTIONS)
        headers.prefix[(world,)](counts, self._ends, length, counts_stride, TILE=tiling.scores, **OPTIONS)
        headers.inspect[(world,)](
            rows.view(torch.int64), self._sums, counts, self._ends, self.status, stride, counts_stride, length,
            form.k, world, bucket, step, signed_fingerprint(form), TILE=tiling.scores, **OPTIONS,
        )  # fmt: skip
        if form.bitmap:
            self.numbers.fill_(-1)
            receiving.spread[(length, world)](
                words, self._ends, self.status, self.numbers, stride, self.pitch, bits, form.k,
                TILE=tiling.scores, **OPTIONS,
            )  # fmt: skip
        else:
            receiving.expand[(-(-form.k // tiling.blocks), world)](
                places, self._ends, self.status, self.numbers, stride, self.pitch, length, length.bit_length(),
                form.k, world, TILE=tiling.blocks, **OPTIONS,
            )  # fmt: skip
