"""Earliest deadline first on a low-bandwidth link (StellaTrain, sec. 3.3): awaited sums cross it before stale ones.

The sums that are awaited at the end of a backward pass have to be there a whole step before those that are stale. If
both crossed the link together, they would share it, and the step would wait for the slower ones. So stale sums begin
when all synchronous ones of their step have arrived, in the order of the buckets, in which the next step takes them.
That order is the same on all ranks, whenever each of them gets there.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_hetero.comm.collectives.async_ops import forward_result

__all__ = ["TransferQueue"]

Future = torch.futures.Future[Any]


class TransferQueue:
    """Hold transfers back until those with an earlier deadline are over.

    On a GPU it holds nothing back: there the host does not see when a transfer is over, and waiting for it would stop
    the backward pass.

    Args:
        running: whether it holds anything back.
    """

    def __init__(self, running: bool = True) -> None:
        self.running = running
        self._first: list[Future] = []
        self._held: deque[tuple[list[Future], Callable[[], Future], Future]] = deque()
        self._lock = threading.RLock()

    def begin_step(self) -> None:
        """Begin with the transfers of another step."""
        self._first = []

    def before(self, future: Future) -> None:
        """Await this transfer of the running step, which is in flight, before those that are held back."""
        self._first.append(future)

    def add(self, buffer: torch.Tensor, send: Callable[[], Future]) -> Future:
        """Call ``send`` when it is its turn; what is returned is done when that transfer is.

        Args:
            buffer: what is sent.
            send: begins the transfer.
        """
        if not self.running or buffer.is_cuda:
            return send()
        waiting = [future for future in self._first if not future.done()]
        done: Future = torch.futures.Future()
        with self._lock:
            self._held.append((waiting, send, done))
        for future in waiting:
            future.then(lambda _: self._advance())
        self._advance()
        return done

    def _advance(self) -> None:
        """Send what need not wait any more, always the oldest first."""
        with self._lock:
            while self._held and all(future.done() for future in self._held[0][0]):
                _, send, done = self._held.popleft()
                try:
                    send().then(partial(forward_result, done))
                except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the sum
                    done.set_exception(error)
