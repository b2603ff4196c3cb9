"""Calls to the job's store that the caller can give up."""

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["StoreCalls"]

log = logging.getLogger("lightning_hetero")

_Work: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]"


class StoreCalls:
    """Calls to a store that may never return, made in a separate thread: the caller can stop waiting.

    A client of torch's store waits without bound for a server that is stopped.
    """

    def __init__(self, timeout: float, notice: float) -> None:
        self.timeout, self.notice = timeout, min(notice, timeout)
        self._work: _Work | None = None

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Return what the call returns, or raise what it raises.

        Raises:
            TimeoutError: if the call does neither in time.
        """
        if self._work is None:
            self._work = queue.SimpleQueue()
            weakref.finalize(self, self._work.put, None)  # the thread ends with its owner
            # a daemon, so that a process can end while a call does not return
            threading.Thread(target=_serve, args=(self._work,), name="lightning_hetero-store", daemon=True).start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._work.put((call, answer))
        try:
            value = answer.get(timeout=self.notice)
        except queue.Empty:
            value = self._wait_on(answer)
        if isinstance(value, Exception):
            raise value
        return value

    def _wait_on(self, answer: "queue.SimpleQueue[Any]") -> Any:
        rest = self.timeout - self.notice
        if rest > 0:
            log.warning(
                "the job's store has not answered for %.0f s: the process that holds it (rank 0, or the launcher) "
                "stands still. This worker waits for another %.0f s, then ends.",
                *(self.notice, rest),
            )
            try:
                return answer.get(timeout=rest)
            except queue.Empty:
                pass
        raise TimeoutError(f"no answer within {self.timeout:.0f} s")

    def close(self) -> None:
        """End the thread until the next call."""
        if self._work is not None:
            self._work.put(None)
        self._work = None


def _serve(work: "_Work") -> None:
    while (item := work.get()) is not None:
        call, answer = item
        try:
            answer.put(call())
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            answer.put(error)
