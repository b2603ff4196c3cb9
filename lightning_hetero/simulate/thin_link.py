"""A thin link between the workers of one machine, without privileges: gradients are handed out late."""

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from lightning_hetero.comm import sums
from lightning_hetero.core.bandwidth import sum_bytes
from lightning_hetero.core.validation import check_number

__all__ = ["ThinLink"]


class ThinLink:
    """Hands sums and compressed gradients of this process out as a link of a given rate would, one after the other.

    For tests and demonstrations on one machine: the gradients themselves come by the process group, only their arrival
    is put off. It concerns gradients on CPU, and no other collectives.

    Args:
        rate: bytes per second that a worker can send, above 0; may be changed while it runs.
        world_size: number of workers.

    Raises:
        TypeError: if the rate is no number.
        ValueError: if it is not above 0.

    Example:
        >>> ThinLink(12.5e6, world_size=2).rate
        12500000.0
    """

    def __init__(self, rate: float, world_size: int) -> None:
        self.rate = check_number("rate", rate, low=0.0, include_low=False)
        self.world_size = world_size
        self._free = 0.0
        self._way: queue.Queue[Any] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._sum, self._gather = sums.sum_over_ranks, sums.gather_rows

    def start(self) -> "ThinLink":
        """Make the link thin."""
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()
        self._sum, sums.sum_over_ranks = sums.sum_over_ranks, self._late_sum
        self._gather, sums.gather_rows = sums.gather_rows, self._late_rows
        return self

    def stop(self) -> None:
        """Put the link back, once everything under way has arrived."""
        if self._thread is not None:
            sums.sum_over_ranks, sums.gather_rows = self._sum, self._gather
            self._way.put(None)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "ThinLink":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _late_sum(self, buffer: torch.Tensor, group: Any = None) -> torch.futures.Future[Any]:
        done = self._sum(buffer, group)
        seconds = sum_bytes(buffer.numel() * buffer.element_size(), self.world_size) / self.rate
        self._free = max(time.perf_counter(), self._free) + seconds
        late: torch.futures.Future[Any] = torch.futures.Future()
        self._way.put((done, self._free, late))
        return late

    def _late_rows(
        self, rows: torch.Tensor, rank: int, arrived: Callable[[int], None] | None = None, group: Any = None
    ) -> None:
        self._gather(rows, rank, None, group)
        seconds = (self.world_size - 1) * rows[0].numel() * rows.element_size() / self.rate
        self._free = max(time.perf_counter(), self._free) + seconds
        time.sleep(max(self._free - time.perf_counter(), 0.0))
        for peer in range(len(rows)):
            if arrived is not None:
                arrived(peer)

    def _deliver(self) -> None:
        while (item := self._way.get()) is not None:
            done, due, late = item
            try:
                value = done.wait()
                time.sleep(max(due - time.perf_counter(), 0.0))
                late.set_result(value)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the sum
                late.set_exception(error)
