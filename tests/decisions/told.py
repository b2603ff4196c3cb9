"""Ranks whose time is told, not measured: what a step takes is given, whatever the machine does."""

import time
from contextlib import contextmanager

import pytest

TICK = 2.0**-12
"""Ticks add up exactly."""


class Told:
    """A clock that moves when it is told to; computing of a batch is spent in its loss."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


@contextmanager
def told_time():
    """The clock of this process while the context lasts; our own bookkeeping takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Told()
        patch.setattr(time, "perf_counter", clock)
        patch.setattr(time, "thread_time", lambda: 0.0)
        yield clock
