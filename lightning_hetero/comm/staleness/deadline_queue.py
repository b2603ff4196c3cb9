"""Earliest deadline first on a low-bandwidth link (StellaTrain, sec. 3.3): synchronous sums cross it before stale ones.

Synchronous sums are awaited at the end of the backward pass, a whole step before stale ones. If both crossed the link
together, they would share it and delay the step. So stale sums begin when all synchronous sums of their step have
arrived, in the order of the buckets, in which the next step takes them. That order is the same on all ranks, at
whatever time each rank gets there.
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
    """Queue that holds transfers back until those with an earlier deadline are over.

    On a GPU it holds nothing back: there the host does not see when a transfer is over, and waiting for it would stop
    the backward pass.

    Args:
        running: whether the queue holds anything back.
    """

    def __init__(self, running: bool = True) -> None:
        self.running = running
        self._first: list[Future] = []
        self._held: deque[tuple[list[Future], Callable[[], Future], Future]] = deque()
        self._lock = threading.RLock()

    def begin_step(self) -> None:
        """Begin a step, which has no synchronous transfers yet."""
        self._first = []

    def before(self, future: Future) -> None:
        """Register a synchronous transfer in flight, which transfers added later in this step have to wait for."""
        self._first.append(future)

    def add(self, buffer: torch.Tensor, send: Callable[[], Future]) -> Future:
        """Call ``send`` in its turn; return a future that is done when the transfer is.

        Args:
            buffer: the tensor to send.
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
        """Start the held transfers that need not wait any longer, the oldest first."""
        with self._lock:
            while self._held and all(future.done() for future in self._held[0][0]):
                _, send, done = self._held.popleft()
                try:
                    send().then(partial(forward_result, done))
                except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the sum
                    done.set_exception(error)
