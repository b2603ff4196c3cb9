"""Selection of blocks on the device, and the message with them."""

import torch

from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.message_header import HEADER_BYTES
from lightning_hetero.compression.triton_gpu import encode_kernels as encoding
from lightning_hetero.compression.triton_gpu import header_kernels as headers
from lightning_hetero.compression.triton_gpu.launch import EIGHT_WARPS, OPTIONS, Tiling
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["MessageWriter", "signed_fingerprint", "sum_words", "value_views"]


class MessageWriter:
    """Scores of all blocks, the selection, and the message of this rank.

    Args:
        layout: places of the parameters.
        form: format of its messages.
        device: device of the residuals.
        tiling: sizes of the parts that a program processes.
    """

    def __init__(self, layout: Layout, form: MessageFormat, device: torch.device, tiling: Tiling) -> None:
        self._device, self._tiling = device, tiling
        tiles = max(1, -(-layout.num_blocks // tiling.scores))  # also one if all parameters are empty
        rows = -(-tiles // tiling.repeats) * tiling.repeats * tiling.scores
        self._padded_scores = torch.zeros(rows, dtype=torch.float32, device=device)
        self.scores = self._padded_scores[: layout.num_blocks]
        self.histogram = self._integers(encoding.EXPONENT_BINS)
        """Histogram of the scores' exponents; ``pick`` clears it."""
        self._plan = self._integers(5)
        self._above, self._edge, self._above_ends, self._edge_ends = (self._integers(tiles) for _ in range(4))
        self._sums = torch.zeros(1, 2, dtype=torch.int64, device=device)
        self.reform(form)

    def _integers(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def reform(self, form: MessageFormat) -> None:
        """Write messages of another format from the next step on."""
        self._form = form
        self.chosen = self._integers(form.k).fill_(-1)
        """Numbers of the chosen blocks, -1 in empty slots."""

    def write(self, message: torch.Tensor, residual: torch.Tensor, *, step: int, bucket: int, rank: int) -> None:
        """Write the message of this step and subtract its values from the residual."""
        form, scores, tiles, tiling = self._form, self._padded_scores, len(self._above), self._tiling
        # The bin of the k-th largest score: first by the exponents, then by the 7 bits below them.
        encoding.pick[(1,)](self.histogram, self._plan, form.k, FINE=False, **OPTIONS)
        encoding.refine[(-(-tiles // tiling.repeats),)](
            scores, self.histogram, self._plan, TILE=tiling.scores, ITERS=tiling.repeats, **OPTIONS
        )
        encoding.pick[(1,)](self.histogram, self._plan, form.k, FINE=True, **OPTIONS)
        # Slots are prefix sums over tiles, which are the same in every run, unlike atomic counters.
        encoding.count[(tiles,)](scores, self._plan, self._above, self._edge, TILE=tiling.scores, **OPTIONS)
        for counts, ends in ((self._above, self._above_ends), (self._edge, self._edge_ends)):
            headers.prefix[(1,)](counts, ends, tiles, 0, TILE=tiling.scores, **OPTIONS)
        self.chosen.fill_(-1)
        encoding.place[(tiles,)](
            scores, self._plan, self._above_ends, self._edge_ends, self.chosen, form.k, TILE=tiling.scores,
            **EIGHT_WARPS,
        )  # fmt: skip
        message.zero_()
        index, counts = form.index_views(message)
        value, scale = value_views(form, message)
        encoding.pack[(-(-form.k // tiling.blocks),)](
            self.chosen, residual, value, scale, index.view(torch.int32) if form.bitmap else index, counts, form.k,
            BLOCK=form.block, TILE=tiling.blocks, INT8=form.value_dtype == "int8", SEGMENTS=not form.bitmap,
            **EIGHT_WARPS,
        )  # fmt: skip
        sum_words(form, message, self._sums, tiling)
        headers.seal[(1,)](
            message[:HEADER_BYTES].view(torch.int64), self._sums, self._plan, self._above_ends, self._edge_ends, tiles,
            form.k, rank, bucket, step, signed_fingerprint(form), **OPTIONS,
        )  # fmt: skip


def value_views(form: MessageFormat, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales of the first of some messages; without scales, the values twice."""
    parts = form.value_parts(messages, form.k)
    return parts[0], parts[-1]


def sum_words(form: MessageFormat, messages: torch.Tensor, sums: torch.Tensor, tiling: Tiling) -> None:
    """Add the sums of the payloads of messages, one after the other in memory, to ``sums``, a row for each."""
    units, words = (form.num_bytes - HEADER_BYTES) // 16, tiling.scores * tiling.repeats
    headers.word_sums[(-(-4 * units // words), len(sums))](
        messages.view(-1).view(torch.int32), sums, units, form.num_bytes // 16, TILE=tiling.scores,
        ITERS=tiling.repeats, **EIGHT_WARPS,
    )  # fmt: skip


def signed_fingerprint(form: MessageFormat) -> int:
    """Return the format's fingerprint as a signed number, which always fits into 32 bits, so its type never changes."""
    return form.fingerprint - (form.fingerprint >> 31 << 32)
