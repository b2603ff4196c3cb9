"""Warm-up of block top-k's kernels: compiled and tried before training, so that no step waits for it or fails.

Kernels are compiled at their first launch, one after the other, about a second each. All ranks would wait for that in
their first steps, and again when a change of density needs other kernels. So each is launched once before, for a model
of two parameters: with both forms of indices, every type of gradients, and both aligned and unaligned chunks.
"""

import numpy as np
import torch

from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["launch_all", "warm"]


def launch_all(
    block: int, value_dtype: str, world_size: int, device: torch.device, dtypes: set[torch.dtype], *, hold: bool
) -> list[tuple[MessageFormat, torch.Tensor, list[torch.Tensor]]]:
    """Launch every kernel that training can launch with these settings, whatever the density.

    Args:
        block: elements of a block.
        value_dtype: type of values.
        world_size: number of ranks.
        device: device of the residuals.
        dtypes: types of gradients.
        hold: whether parameters without a gradient are held back.

    Returns:
        For each of two steps, one per form of indices: the format, the message that was sent, and the sums that were
        delivered, one for each type. In each step, blocks 0 and 16 get a gradient of 1 for each type, and other ranks
        send nothing.
    """
    layout = Layout.of([("aligned", 16 * block), ("not", 1)], block)
    forms = [MessageFormat(layout.num_blocks, k, block, value_dtype) for k in (1, 2)]
    encoder, steps = TritonEncoder(layout, forms[0], device, world_size), []
    for step, form in enumerate(forms):
        encoder.reform(form)
        rows = torch.zeros(world_size, form.num_bytes, dtype=torch.uint8)
        for rank in range(1, world_size):
            form.write(
                rows[rank],
                np.zeros(0, np.int64),
                torch.zeros(0, block, dtype=torch.float32),
                bucket=0,
                step=step,
                rank=rank,
            )
        rows = rows.to(device)
        buckets = [torch.zeros(16 * block + 1, dtype=dtype, device=device) for dtype in dtypes]
        for bucket in buckets:
            bucket[0], bucket[-1] = 1.0, 1.0
            encoder.accumulate_bucket(layout.slots, bucket, 1.0, hold=hold)
        encoder.encode(rows[0], step=step)
        encoder.receive(rows, rank=0, step=step)
        for bucket in buckets:
            encoder.deliver_bucket(layout.slots, bucket, 1.0, scale=1.0, fill=0.0)
        encoder.finish()
        steps.append((form, rows[0], buckets))
    return steps


def warm(
    block: int, value_dtype: str, world_size: int, device: torch.device, dtypes: set[torch.dtype], *, hold: bool
) -> None:
    """Do :func:`launch_all`, and check the result as a receiver without a GPU would.

    Raises:
        Exception: whatever the compiler, the driver or the message says, if kernels cannot be used here.
    """
    steps = launch_all(block, value_dtype, world_size, device, dtypes, hold=hold)
    due = [([16], 1), ([0, 16], 3)]  # one of the two equal blocks, and both in the next step
    for step, ((form, message, buckets), (blocks, total)) in enumerate(zip(steps, due, strict=True)):
        pack, _ = form.read(message.cpu(), rank=0, bucket=0, step=step)
        if pack.indices.tolist() != blocks:
            raise RuntimeError(f"they chose blocks {pack.indices.tolist()}, and {blocks} was expected")
        for what, values in (("sent", pack.values), *(("handed on", bucket) for bucket in buckets)):
            share = float(values.sum()) / (total * len(dtypes))
            if not 0.98 < share < 1.02:  # int8 rounding is smaller
                raise RuntimeError(f"they have {what} {share:.3g} of the sum that was expected")
