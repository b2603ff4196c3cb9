"""Where gradients set out: sums and messages, each in one place, so that a link can be made thin for tests."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_rows", "sum_over_ranks", "tensor_of"]


def sum_over_ranks(buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
    """Add a buffer up over all ranks, in place and while other things go on."""
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future


def gather_rows(rows: torch.Tensor, rank: int, arrived: Callable[[int], None] | None = None, group: Any = None) -> None:
    """All-gather in place: row ``i`` is rank ``i``'s; this rank's own is filled already.

    NCCL gathers in one call. On gloo, whose all-gather allocates in every call, a broadcast of each row into its place
    is faster (``benchmarks/compression.py``).

    Args:
        rows: one message of each rank.
        rank: this rank.
        arrived: called with the number of each rank whose message is there, this rank's own when it has left.
        group: process group, ``None`` for the default.
    """
    if dist.get_backend(group) == "nccl":
        dist.all_gather_into_tensor(rows, rows[rank].clone(), group=group)
        works = {}
    else:
        works = {peer: dist.broadcast(row, src=peer, group=group, async_op=True) for peer, row in enumerate(rows)}
    for peer in sorted(range(len(rows)), key=lambda peer: peer != rank):
        if peer in works:
            works[peer].wait()
        if arrived is not None:
            arrived(peer)


def tensor_of(value: Any) -> torch.Tensor:
    """The tensor of a finished collective, which some backends give in a list."""
    result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return result
