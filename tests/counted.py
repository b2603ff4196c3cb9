"""Ranks whose time is counted, not measured: what computing and messages take is given, whatever the machine does."""

import time
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.core.link.bandwidth import sum_bytes
from tests.ranks import at_end

LATENCY = 1e-4
CLOCK, EXCHANGES = time.perf_counter, (sums.async_all_reduce, sums.async_all_gather, dist.barrier, dist.all_reduce)


def _restore():
    time.perf_counter = CLOCK
    sums.async_all_reduce, sums.async_all_gather, dist.barrier, dist.all_reduce = EXCHANGES


class CountedTime:
    """The clock of a rank, and the link to the other ones; takes the place of ``perf_counter`` until the job is over.

    Computing takes what :meth:`spend` is given, 3 % more or less by numbers that are drawn. Sums and messages of
    gradients are exchanged for real, and are there when a link of this rate would have brought them: after the last
    rank was ready, and after what is still under way.

    Args:
        rank: of this process.
        rate: bytes per second that a worker can send; may be changed at any time.

    Attributes:
        now: seconds since the start.
        sent: bytes of the sum or message that set out last.
    """

    def __init__(self, rank, rate):
        self.now, self.rate, self.sent, self._free = 0.0, rate, 0.0, 0.0
        self._scatter = np.random.default_rng(rank)
        self._sum, self._gather, self._barrier = sums.async_all_reduce, sums.async_all_gather, dist.barrier
        time.perf_counter = lambda: self.now
        at_end(_restore)
        sums.async_all_reduce, sums.async_all_gather, dist.barrier = self.sum, self.gather, self.barrier

    def spend(self, seconds):
        self.now += seconds * self._scatter.uniform(0.97, 1.03)

    def sleep(self, seconds):
        self.now += seconds

    def last_ready(self):
        """When the last rank gets here, by the clock of this one, to which all are then set."""
        moment = torch.tensor([self.now], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        return float(moment)

    def barrier(self, *args, **kwargs):
        self._barrier(*args, **kwargs)
        self.now = self.last_ready()

    def there(self, num_bytes):
        """When so many bytes have arrived that set out now."""
        self.sent = num_bytes
        self._free = max(self.last_ready(), self._free) + num_bytes / self.rate
        return self._free + LATENCY

    @contextmanager
    def at(self, moment):
        before, self.now = self.now, moment
        yield
        self.now = before

    def sum(self, buffer, group=None):
        done = self._sum(buffer, group)
        done.wait()
        self.now = self.there(sum_bytes(buffer.numel() * buffer.element_size(), dist.get_world_size()))
        return done

    def gather(self, rows, own, sources, group=None, arrived=None, order=None):
        self._gather(rows, own, sources, group).wait()
        moment = self.there((len(rows) - 1) * rows[own].numel())
        with self.at(moment):
            for row in range(len(rows) if arrived is not None else 0):
                arrived(row)
        return _Message(self, moment)


class _Message:
    """What is under way until a moment."""

    def __init__(self, time, moment):
        self.time, self.moment = time, moment

    def wait(self):
        self.time.now = max(self.time.now, self.moment)

    def then(self, callback):
        done = torch.futures.Future()
        done.set_result(None)
        with self.time.at(max(self.time.now, self.moment)):
            return done.then(callback)
