"""Block top-k with error feedback in plain torch: the definition that every fast path is tested against.

It differs from StellaTrain (S sec. 3.2) in three points: the threshold comes from the scores of this step, the score of
a tail block is a sum of magnitudes, too, and rounding errors return to the residual.
"""

from dataclasses import dataclass

import torch

from lightning_hetero.compression.value_codecs import CODECS
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["Pack", "block_scores", "compress", "merge", "merge_sparse", "select_exact"]


@checked_keywords
@dataclass(frozen=True)
class Pack:
    """Blocks that one worker sends.

    Args:
        indices: their numbers, int64, ascending, each once.
        values: values that receivers add, float32, shape ``(len(indices), block)``.
    """

    indices: torch.Tensor
    values: torch.Tensor


def block_scores(flat: torch.Tensor, block: int = 16) -> torch.Tensor:
    """Return the sum of magnitudes of each block of ``block`` contiguous elements; the last one may be shorter.

    Example:
        >>> block_scores(torch.tensor([1.0, -2.0, 3.0]), block=2).tolist()
        [3.0, 3.0]
    """
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % block))
    return padded.view(-1, block).abs().sum(1)


def select_exact(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the numbers of the ``k`` largest scores above 0, ascending; of equal scores the first ones.

    Example:
        >>> select_exact(torch.tensor([1.0, 3.0, 0.0, 2.0]), 2).tolist()
        [1, 3]
    """
    top = scores.sort(descending=True, stable=True).indices[:k]
    return top[scores[top] > 0].sort().values


def compress(
    residual: torch.Tensor, gradient: torch.Tensor, weight: float, k: int, *, block: int = 16, value_dtype: str
) -> Pack:
    """Apply ``r += w g``; send the ``k`` blocks with the largest ``sum |r|``; ``r -= sent``.

    ``sent + residual == residual_before + weight * gradient`` holds bitwise in float32, for every type of values.

    Args:
        residual: flat, changed in place, a multiple of ``block`` long.
        gradient: flat, at most as long.
        weight: share of this worker, ``b_i / B``.
        k: most blocks to send.
        block: elements of a block.
        value_dtype: type of values on the wire.

    Example:
        >>> residual = torch.zeros(4)
        >>> pack = compress(residual, torch.tensor([1.0, 2.0, 0.5, 0.0]), 0.5, 1, block=2, value_dtype="float32")
        >>> pack.indices.tolist(), pack.values.tolist(), residual.tolist()
        ([0], [[0.5, 1.0]], [0.0, 0.0, 0.25, 0.0])
    """
    residual[: gradient.numel()].add_(gradient, alpha=weight)
    blocks = residual.view(-1, block)
    indices = select_exact(block_scores(residual, block), k)
    codec = CODECS[value_dtype]
    values = codec.decode(codec.encode(blocks[indices]))
    blocks[indices] -= values.to(blocks.dtype)
    return Pack(indices, values)


def merge(packs: list[Pack], num_blocks: int, *, block: int = 16) -> torch.Tensor:
    """Return the sum of packs, in the order given, as a flat float32 tensor.

    Example:
        >>> one = Pack(torch.tensor([1]), torch.tensor([[1.0, 2.0]]))
        >>> merge([one, one], 2, block=2).tolist()
        [0.0, 0.0, 2.0, 4.0]
    """
    out = torch.zeros(num_blocks, block, dtype=torch.float32)
    for pack in packs:
        out.index_add_(0, pack.indices, pack.values)
    return out.view(-1)


def merge_sparse(packs: list[Pack]) -> Pack:
    """Return the sum of packs, in the order given, as one pack: bitwise that of :func:`merge`, touched blocks only.

    Example:
        >>> one, other = Pack(torch.tensor([1]), torch.ones(1, 2)), Pack(torch.tensor([1, 4]), torch.ones(2, 2))
        >>> both = merge_sparse([one, other])
        >>> both.indices.tolist(), both.values.tolist()
        ([1, 4], [[2.0, 2.0], [1.0, 1.0]])
    """
    indices = torch.cat([pack.indices for pack in packs]).unique()
    values = torch.zeros(len(indices), packs[0].values.shape[1], dtype=torch.float32, device=indices.device)
    for pack in packs:
        values.index_add_(0, torch.searchsorted(indices, pack.indices), pack.values)
    return Pack(indices, values)
