"""Where every sum of gradients and every message sets out: one place, so that a link can be made thin for tests."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_over_ranks", "hand_on", "sum_over_ranks", "tensor_of", "wait_for"]


def sum_over_ranks(buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
    """Add a buffer up over all ranks, in place and while other things go on."""
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future


def gather_over_ranks(
    rows: torch.Tensor, own: int, sources: Sequence[int], group: Any = None
) -> torch.futures.Future[Any]:
    """All-gather in place while other things go on: row ``i`` is that of rank ``sources[i]``; the own one is filled.

    NCCL gathers in one call. On gloo, whose all-gather allocates in every call, a broadcast of each row into its place
    is faster (``benchmarks/compression.py``).

    Args:
        rows: uint8, a row for each source.
        own: number of this rank's row.
        sources: ranks that send.
        group: their process group, ``None`` for the default.

    Returns:
        A future that is done when all rows are there, for :func:`wait_for`.
    """
    if dist.get_backend(group) == "nccl":
        work = dist.all_gather_into_tensor(rows, rows[own].clone(), group=group, async_op=True)
        whole: torch.futures.Future[Any] = work.get_future()
        return whole
    parts = [
        dist.broadcast(row, src=source, group=group, async_op=True).get_future()
        for source, row in zip(sources, rows, strict=True)
    ]
    everything: torch.futures.Future[Any] = torch.futures.collect_all(parts)
    return everything


def wait_for(gathered: torch.futures.Future[Any]) -> None:
    """Wait for all rows of :func:`gather_over_ranks`; what one of them raised is raised here."""
    parts = gathered.wait()
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, torch.futures.Future):
            part.wait()


def tensor_of(value: Any) -> torch.Tensor:
    """The tensor of a finished collective, which some backends give in a list."""
    result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return result


def hand_on(to: torch.futures.Future[Any], done: torch.futures.Future[Any]) -> None:
    """Give what a finished future holds, a value or an error, to another one."""
    try:
        to.set_result(done.value())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the other
        to.set_exception(error)
