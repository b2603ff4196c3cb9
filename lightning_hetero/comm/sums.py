"""Where every sum of gradients and every message sets out: one place, so that a link can be made thin for tests."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_over_ranks", "hand_on", "pending", "sum_over_ranks", "tensor_of"]


def sum_over_ranks(buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
    """Add a buffer up over all ranks, in place and while other things go on."""
    future: torch.futures.Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future


def gather_over_ranks(
    rows: torch.Tensor,
    own: int,
    sources: Sequence[int],
    group: Any = None,
    arrived: Callable[[int], None] | None = None,
) -> torch.futures.Future[Any]:
    """All-gather in place while other things go on: row ``i`` is that of rank ``sources[i]``; the own one is filled.

    NCCL gathers in one call. On gloo, whose all-gather allocates in every call, a broadcast of each row into its place
    is faster (``benchmarks/compression.py``).

    Args:
        rows: uint8, a row for each source.
        own: number of this rank's row.
        sources: ranks that send.
        group: their process group, ``None`` for the default.
        arrived: called with the number of each row that is there, from a thread of the process group.
    """
    each = partial(_tell, arrived)
    if dist.get_backend(group) == "nccl":
        work = dist.all_gather_into_tensor(rows, rows[own], group=group, async_op=True)  # in place
        whole: torch.futures.Future[Any] = work.get_future().then(partial(each, range(len(rows))))
        return whole
    parts = [
        dist.broadcast(row, src=source, group=group, async_op=True).get_future().then(partial(each, [i]))
        for i, (source, row) in enumerate(zip(sources, rows, strict=True))
    ]
    everything: torch.futures.Future[Any] = torch.futures.collect_all(parts).then(_all_of_them)
    return everything


def _tell(arrived: Callable[[int], None] | None, rows: Iterable[int], done: torch.futures.Future[Any]) -> None:
    """Say that rows have arrived, or raise why they have not."""
    done.value()
    if arrived is not None:
        for row in rows:
            arrived(row)


def _all_of_them(done: torch.futures.Future[Any]) -> None:
    """Raise what any of them raised."""
    for part in done.value():
        part.value()


def tensor_of(value: Any) -> torch.Tensor:
    """The tensor of a finished collective, which some backends give in a list."""
    result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return result


def pending(buffer: torch.Tensor) -> Any:
    """A future that is set by hand, for a tensor on this device."""
    return torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()


def hand_on(to: torch.futures.Future[Any], done: torch.futures.Future[Any]) -> None:
    """Give what a finished future holds, a value or an error, to another one."""
    try:
        to.set_result(done.value())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the other
        to.set_exception(error)
