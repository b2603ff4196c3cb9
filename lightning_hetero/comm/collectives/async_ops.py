"""Start of every gradient all-reduce and every message, in one place where tests can slow the link down."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.backends import backend_of
from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = [
    "GatherHandle",
    "SharedNotes",
    "async_all_gather",
    "async_all_reduce",
    "forward_result",
    "make_future",
    "num_bytes",
    "tensor_of",
]


def async_all_reduce(buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
    """Begin an all-reduce of a buffer over all ranks, in place.

    On a CPU it calls the process group directly, as DDP does: the lookups of ``dist.all_reduce`` take as long again as
    starting the sum, in the middle of a backward pass whose matrices have filled the caches.
    """
    if buffer.device.type != "cpu" or buffer.is_complex():
        work = dist.all_reduce(buffer, group=group, async_op=True)
    else:
        group = group or dist.group.WORLD
        assert group is not None
        work = group.allreduce([buffer])
    future: torch.futures.Future[Any] = work.get_future()
    if buffer.is_cuda and backend_of(buffer.device, group) != "nccl":
        return _on_streams(buffer, work, future)
    return future


def _on_streams(buffer: torch.Tensor, work: Any, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Return a future that, like NCCL's, makes the waiting caller's stream wait for the sum.

    Gloo copies a sum back to the GPU on a stream of its own. Its future is done when the copy has begun, and orders no
    stream behind the copy: a reader on another stream than the default one would see the old values.
    """
    ordered: torch.futures.Future[Any] = make_future(buffer)

    def landed(done: torch.futures.Future[Any]) -> None:
        try:
            done.value()
            work.synchronize()  # orders this thread's stream, which set_result then notes down
            ordered.set_result(buffer)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            ordered.set_exception(error)

    future.then(landed)
    return ordered


def num_bytes(buffer: torch.Tensor) -> int:
    """Return the bytes of a bucket; for a sparse gradient, those of its rows and of their indices.

    Example:
        >>> num_bytes(torch.zeros(3)), num_bytes(torch.eye(3).to_sparse(1))
        (12, 60)
    """
    parts = (buffer._indices(), buffer._values()) if buffer.is_sparse else (buffer,)
    return sum(part.nbytes for part in parts)


class GatherHandle:
    """Rows that gloo has in flight; waiting for them takes no callback thread, which would need the interpreter lock.

    Rows are waited for in turn. To notice each arrival in time, the row that took longest comes last the next time.

    Args:
        works: work handle of each row.
        arrived: called with the number of each row that has arrived.
        order: rows in the order of waiting; sorted anew after each wait.
    """

    def __init__(self, works: list[Any], arrived: Callable[[int], None] | None, order: list[int]) -> None:
        self._works, self._arrived, self._order = works, arrived, order
        self._everything: torch.futures.Future[Any] | None = None

    def wait(self) -> None:
        """Wait until all rows have arrived.

        Raises:
            RuntimeError: if a row does not come.
        """
        if self._everything is not None:
            self._everything.wait()
            for work in self._works:  # done already; orders this stream behind the copies to a GPU
                work.wait()
            return
        blocked, before = {}, time.perf_counter()
        for row in self._order:
            self._works[row].wait()
            if self._arrived is not None:
                self._arrived(row)
            now = time.perf_counter()
            blocked[row], before = now - before, now
        self._order.sort(key=blocked.__getitem__)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Call ``callback`` from a thread of the process group when all rows have arrived."""
        if self._everything is None:
            each = partial(_tell, self._arrived)
            parts = [work.get_future().then(partial(each, [row])) for row, work in enumerate(self._works)]
            self._everything = torch.futures.collect_all(parts).then(_all_of_them)
        return self._everything.then(callback)


def async_all_gather(
    rows: torch.Tensor,
    own: int,
    sources: Sequence[int],
    group: Any = None,
    arrived: Callable[[int], None] | None = None,
    order: list[int] | None = None,
) -> Any:
    """Begin an all-gather in place: row ``i`` comes from rank ``sources[i]``; this rank's own row is already filled.

    NCCL gathers in one call. On gloo, whose all-gather allocates in every call, a broadcast of each row into its place
    is faster (``benchmarks/compression.py``).

    Args:
        rows: uint8, one row for each source.
        own: index of this rank's row.
        sources: ranks that send.
        group: their process group, ``None`` for the default.
        arrived: called with the number of each row that is there.
        order: rows in the order of waiting, see :class:`GatherHandle`.

    Returns:
        A future or a :class:`GatherHandle`, either of which can be waited for.
    """
    if backend_of(rows.device, group) == "nccl":
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
        work = gather(rows.view(-1), rows[own], group=group, async_op=True)  # in place
        return work.get_future().then(partial(partial(_tell, arrived), range(len(rows))))
    works = [
        dist.broadcast(row, src=source, group=group, async_op=True) for source, row in zip(sources, rows, strict=True)
    ]
    return GatherHandle(works, arrived, list(range(len(rows))) if order is None else order)


def _tell(arrived: Callable[[int], None] | None, rows: Iterable[int], done: torch.futures.Future[Any]) -> None:
    """Report that rows have arrived, or raise the error that prevented it."""
    done.value()
    if arrived is not None:
        for row in rows:
            arrived(row)


def _all_of_them(done: torch.futures.Future[Any]) -> None:
    """Raise the first error among the finished futures."""
    for part in done.value():
        part.value()


def tensor_of(value: Any) -> torch.Tensor:
    """Return the tensor of a finished collective, which some backends give in a list."""
    result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return result


def make_future(buffer: torch.Tensor) -> Any:
    """Return a future to be completed by hand, for a tensor on the buffer's device."""
    return torch.futures.Future(devices=[buffer.device]) if buffer.is_cuda else torch.futures.Future()


def forward_result(to: torch.futures.Future[Any], done: torch.futures.Future[Any]) -> None:
    """Copy the value or error of a finished future to another one."""
    try:
        to.set_result(done.value())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the other
        to.set_exception(error)


class SharedNotes:
    """Numbers of all ranks, exchanged over the host-side group and read a step later, so that no rank waits.

    Args:
        control: control plane of the ranks.
        count: how many numbers a rank notes.

    Example:
        >>> notes = SharedNotes(ControlPlane(0, 1), 2)
        >>> notes.take(), notes.send([15, 0]), notes.take()
        ([0, 0], None, [15, 0])
    """

    def __init__(self, control: ControlPlane, count: int) -> None:
        self._control, self._none = control, [0] * count
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None
        self._begin_maximum: Callable[[torch.Tensor], Any] | None = None

    def exchange(self, notes: Sequence[int]) -> list[int]:
        """Return what :meth:`take` does, and send what this rank has noted since."""
        told = self.take()
        self.send(notes)
        return told

    def send(self, notes: Sequence[int]) -> None:
        """Send what this rank has noted; all ranks do so at the same step."""
        values, work = torch.tensor(notes), None
        if self._control.world_size > 1:
            self._begin_maximum = self._begin_maximum or self._control.maximum_later()
            work = self._begin_maximum(values)
        self._sent = values, work

    def take(self) -> list[int]:
        """Return the maximum over all ranks of what was sent last; zeros if nothing was sent since the last call."""
        if self._sent is None:
            return list(self._none)
        (values, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        found: list[int] = values.tolist()
        return found
