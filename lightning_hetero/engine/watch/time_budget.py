"""Time that watching over a run may take: a small share of that of the run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["MAX_SHARE", "TimeBudget"]

MAX_SHARE = 0.003
"""Largest share of the time that recording and its predictions take; what is beyond it is left out."""


class TimeBudget:
    """CPU seconds that watching over a run has taken, and whether there is time for more.

    Args:
        clock: returns seconds.
        work: returns the CPU seconds of the calling thread.

    Attributes:
        spent: CPU seconds so far.

    Example:
        >>> seconds = iter([0.0, 5.0, 5.0])
        >>> budget = TimeBudget(clock=lambda: next(seconds), work=lambda: 0.0)
        >>> budget.elapsed, budget.may
        (5.0, True)
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, work: Callable[[], float] = lambda: time.thread_time()
    ) -> None:
        self._clock, self._work = clock, work
        self._began, self.spent = clock(), 0.0

    def begin(self) -> None:
        """Begin a run, which has a budget of its own."""
        self._began, self.spent = self._clock(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._began

    @property
    def may(self) -> bool:
        """``True`` if more fits into the share of the time, which begins with that of ten seconds."""
        return self.spent <= MAX_SHARE * max(self.elapsed, 10.0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the CPU seconds inside."""
        began = self._work()
        try:
            yield
        finally:
            self.spent += self._work() - began
