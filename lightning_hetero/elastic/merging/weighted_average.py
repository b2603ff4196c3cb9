"""Weighted sums of the ranks' tensors in flat buckets; several are in flight while the next one is packed."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

__all__ = ["buckets", "synchronize", "weighted_sums"]

MERGE_BUCKET_BYTES = 16 * 2**20


def buckets(tensors: Mapping[str, torch.Tensor], bucket_bytes: int = MERGE_BUCKET_BYTES) -> list[list[str]]:
    """Group the tensors' names by dtype and device, at most ``bucket_bytes`` each unless one alone is larger.

    Example:
        >>> buckets({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(1).double()}, bucket_bytes=32)
        [['a', 'b'], ['c']]
    """
    groups: list[list[str]] = []
    kind, filled = None, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (str(item[1].dtype), str(item[1].device))):
        size = tensor.numel() * tensor.element_size()
        if (tensor.dtype, tensor.device) != kind or filled + size > bucket_bytes:
            groups.append([])
            kind, filled = (tensor.dtype, tensor.device), 0
        groups[-1].append(name)
        filled += size
    return groups


def weighted_sums(
    tensors: Mapping[str, torch.Tensor],
    weight: float,
    *,
    world_size: int,
    bucket_bytes: int = MERGE_BUCKET_BYTES,
    in_flight: int = 3,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``sum_i weight_i tensor_i`` over the ranks for each tensor; a collective that must be run to its end.

    Sums are formed in float32 at least. A rank with weight 0 adds nothing, whatever it holds (not even ``nan``).

    Args:
        tensors: floating-point tensors by name, of the same names and shapes on all ranks.
        weight: weight of this rank.
        world_size: number of ranks; with one, nothing is sent.
        bucket_bytes: largest size of a bucket, unless one tensor alone is larger.
        in_flight: buckets in flight at a time.

    Example:
        >>> dict(weighted_sums({"w": torch.tensor([2.0, 4.0])}, 0.5, world_size=1))
        {'w': tensor([1., 2.])}
    """
    waiting: deque[tuple[Sequence[str], torch.Tensor, dist.Work | None]] = deque()

    def finished() -> Iterator[tuple[str, torch.Tensor]]:
        names, flat, work = waiting.popleft()
        if work is not None:
            work.wait()
        parts = flat.split([tensors[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            yield name, part.view_as(tensors[name])

    for names in buckets(tensors, bucket_bytes):
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in names])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        flat = flat.mul_(weight) if weight else flat.zero_()
        work = dist.all_reduce(flat, async_op=True) if world_size > 1 else None
        waiting.append((names, flat, work))
        if len(waiting) > in_flight:
            yield from finished()
    while waiting:
        yield from finished()


def synchronize(tensors: Mapping[str, torch.Tensor], *, world_size: int) -> None:
    """Give all ranks rank 0's tensors; collective."""
    if world_size > 1:
        for name in sorted(tensors):
            sent = tensors[name].detach().contiguous()
            dist.broadcast(sent, src=0)
            tensors[name].detach().copy_(sent)
