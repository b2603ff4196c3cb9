"""Emulation of a low-bandwidth link between workers on one machine, without privileges: gradients arrive late."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives.async_ops import forward_result
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.bandwidth import sum_bytes
from lightning_hetero.core.validation import check_number

__all__ = ["ThinLink"]


@checked_keywords
class ThinLink:
    """Link of a given rate, which delays the gradient sums and messages of this process.

    It is for tests and demonstrations on one machine. The process group computes the sums; only their arrival is
    delayed. It affects plain sums and block top-k of gradients on CPU, and no other collective.

    Args:
        rate: bytes per second that a worker can send, above 0; may be changed while it runs.
        world_size: number of workers.
        shared: whether everything in flight shares the link equally, as connections do, instead of crossing it in
            first-in, first-out order.

    Raises:
        TypeError: if the rate is no number.
        ValueError: if it is not above 0.

    Example:
        >>> ThinLink(12.5e6, world_size=2).rate
        12500000.0
    """

    rate_check_s = 0.05
    """Longest time after which a change of the rate takes effect."""

    def __init__(self, rate: float, world_size: int, *, shared: bool = False) -> None:
        self.rate = check_number("rate", rate, low=0.0, include_low=False)
        self.world_size, self.shared = world_size, shared
        self._queue: queue.Queue[Any] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._sum, self._gather = sums.async_all_reduce, sums.async_all_gather

    def start(self) -> "ThinLink":
        """Limit the link to its rate from now on."""
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()
        self._sum, sums.async_all_reduce = sums.async_all_reduce, self._delayed_reduce
        self._gather, sums.async_all_gather = sums.async_all_gather, self._delayed_gather
        return self

    def stop(self) -> None:
        """Remove the limit, once everything in flight has arrived."""
        if self._thread is not None:
            sums.async_all_reduce, sums.async_all_gather = self._sum, self._gather
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "ThinLink":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _delayed_reduce(self, buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
        num_bytes = sum_bytes(buffer.numel() * buffer.element_size(), self.world_size)
        return self._delay(self._sum(buffer, group), num_bytes)

    def _delayed_gather(
        self,
        rows: torch.Tensor,
        own: int,
        sources: Sequence[int],
        group: Any = None,
        arrived: Callable[[int], None] | None = None,
        order: list[int] | None = None,
    ) -> torch.futures.Future[Any]:
        done = self._gather(rows, own, sources, group, None, order)
        delayed = self._delay(done, (len(rows) - 1) * rows[own].numel())

        def tell(done: torch.futures.Future[Any]) -> None:
            done.value()
            if arrived is not None:
                for row in range(len(rows)):
                    arrived(row)

        return delayed.then(tell)

    def _delay(self, done: torch.futures.Future[Any], num_bytes: float) -> torch.futures.Future[Any]:
        delayed: torch.futures.Future[Any] = torch.futures.Future()
        self._queue.put((float(num_bytes), done, delayed))
        return delayed

    def _deliver(self) -> None:
        """Simulate the link from event to event: something is sent, or something arrives."""
        left: list[list[Any]] = []
        ending, before = False, time.perf_counter()
        while left or not ending:
            pause = min(self._seconds_until_next(left), self.rate_check_s) if left else None
            try:
                item = self._queue.get(timeout=pause)
            except queue.Empty:
                item = ()
            now = time.perf_counter()
            self._cross(left, now - before)
            before = now
            if item is None:
                ending = True
            elif item:
                left.append(list(item))

    def _crossing(self, left: list[list[Any]]) -> int:
        return len(left) if self.shared else 1

    def _seconds_until_next(self, left: list[list[Any]]) -> float:
        sharing = self._crossing(left)
        return sharing * min(num_bytes for num_bytes, *_ in left[:sharing]) / self.rate

    def _cross(self, left: list[list[Any]], seconds: float) -> None:
        """Subtract the bytes that the link carried in ``seconds``, and deliver what has arrived."""
        while left:
            sharing, step = self._crossing(left), self._seconds_until_next(left)
            passed = min(step, seconds)
            for item in left[:sharing]:
                item[0] -= passed * self.rate / sharing
            seconds -= passed
            if passed < step:
                return
            for item in [item for item in left[:sharing] if item[0] <= 1e-6]:
                left.remove(item)
                item[1].then(partial(forward_result, item[2]))
