"""Futures in front of those of gradient buckets, which can be failed if gloo does not fail them.

Gloo forgets whom to tell when a connection ends in the middle of a message: the call that waits for the rest does so
until the timeout of the group, half an hour. A future that stands in front of that call's can be failed by a thread.
"""

import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from lightning_hetero.comm.collectives.async_ops import forward_result
from lightning_hetero.comm.membership.group_sockets import keep_groups

__all__ = ["BucketFutures"]

CALLBACKS_HELD = 256
"""Number of newest callbacks that are kept in view."""

Forward = partial[None]


class BucketFutures:
    """Futures in front of those of the buckets that this process has sent.

    Attributes:
        held: callbacks that threads of the process group may still hold.

    Example:
        >>> futures, sent = BucketFutures(), torch.futures.Future()
        >>> waited_for = futures.stand_in(sent, torch.device("cpu"))
        >>> futures.fail("Connection closed", patience_s=0.0)
        1
        >>> waited_for.wait()
        Traceback (most recent call last):
        RuntimeError: Connection closed
    """

    def __init__(self) -> None:
        self.held: deque[weakref.ref[Forward]] = deque(maxlen=CALLBACKS_HELD)
        self._open: dict[int, tuple[torch.futures.Future[Any], weakref.ref[Forward]]] = {}
        self._lock = threading.Lock()

    def stand_in(self, future: torch.futures.Future[Any], device: torch.device) -> torch.futures.Future[Any]:
        """Return a future with the same result, which :meth:`fail` can fail."""
        front: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        forward = partial(self._forward, front)
        held = weakref.ref(forward)
        self.held.append(held)
        with self._lock:
            self._open[id(front)] = front, held
        future.then(forward)
        return front

    def fail(self, text: str, *, patience_s: float = 0.5) -> int:
        """Fail all futures that do not end within a while, for good; return their number.

        The groups whose calls they stood in front of are kept: freeing one waits for its calls.
        """
        deadline = time.monotonic() + patience_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            stuck, self._open = list(self._open.values()), {}
        if stuck:
            keep_groups()
        for front, forward in stuck:
            with suppress(ValueError):  # it was among the older ones
                self.held.remove(forward)
            front.set_exception(RuntimeError(text))
        return len(stuck)

    def _forward(self, front: torch.futures.Future[Any], done: torch.futures.Future[Any]) -> None:
        with self._lock:
            if self._open.pop(id(front), None) is None:
                return
        forward_result(front, done)
