"""A device that works behind the host's back, as a GPU does: what it takes is given, and what is true of it is known.

The host queues kernels and goes on; a mark fires when the device gets there, and cannot be read before. Only a blocking
copy, a barrier and :meth:`FakeDevice.sync` let the host wait. Time is counted, so that a busy machine changes nothing.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.engine import parts

LAUNCH = 1e-3
SUM = 0.01
"""Seconds that the host takes to queue a kernel, and that the link takes for a bucket."""


@dataclass(frozen=True)
class Mark:
    """When the stream gets there."""

    moment: float


class FakeDevice:
    """Host time, a device of two streams, and its clock; with :meth:`install`, those of this process.

    Attributes:
        now: the host's time.
        ends: when each stream has done all that was queued on it.
        stream: the one that work and marks go to.
        steps: when the device has done each optimizer step.
    """

    synchronous = False

    def __init__(self):
        self.now, self.stream = 0.0, "compute"
        self.ends = {"compute": 0.0, "link": 0.0}
        self.steps = []

    # what takes time

    def host(self, seconds):
        """The host works."""
        self.now += seconds

    def spend(self, seconds):
        """A kernel is queued; the host goes on."""
        self.now += LAUNCH
        self.ends[self.stream] = self.reached() + seconds

    def reached(self):
        """When the stream would get to work that is queued now."""
        return max(self.ends[self.stream], self.now)

    def sync(self):
        """The host waits for the device."""
        self.now = self.reached()

    def copy(self, seconds):
        """A batch comes to the device, by a copy that waits for all that was queued before it."""
        self.spend(seconds)
        self.sync()

    def updated(self):
        """An optimizer step is queued."""
        self.steps.append(self.reached())

    def wait_for(self, moment):
        """The stream waits; the host does not."""
        self.ends[self.stream] = max(self.ends[self.stream], moment)

    @contextmanager
    def on(self, stream):
        """Work and marks go to this stream."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    # the observer's clock

    def mark(self):
        return Mark(self.reached())

    def ready(self, mark):
        return mark.moment <= self.now

    def seconds(self, start, end):
        assert self.ready(start), "an event that was not passed cannot be read"
        assert self.ready(end), "an event that was not passed cannot be read"
        return end.moment - start.moment

    def wait(self):
        self.now = max(self.now, *self.ends.values())

    # between ranks: over NCCL the host waits for nothing but a barrier, and for other hosts where ranks agree on plans

    def install(self, patch):
        """Be the device, the clock and the link of this process, while it is patched."""
        self._sum, self._barrier, self._all_reduce = sums.async_all_reduce, dist.barrier, dist.all_reduce
        backward, gather = torch.Tensor.backward, ControlPlane.gather

        def joined(*args, **kwargs):
            backward(*args, **kwargs)
            self.wait_for(self.ends["link"])

        def gathered(control, values):
            everyone = gather(control, values)
            self.now = self.last(self.now)
            return everyone

        patch.setattr(time, "perf_counter", lambda: self.now)
        patch.setattr(parts, "agreed_clock", lambda device, control: self)
        patch.setattr(torch.Tensor, "backward", joined)
        patch.setattr(sums, "async_all_reduce", self.sum)
        patch.setattr(dist, "barrier", self.barrier)
        patch.setattr(dist, "all_reduce", self.all_reduce)
        patch.setattr(ControlPlane, "gather", gathered)
        return self

    def begin(self):
        """A training begins, on all ranks at once, with nothing left to do on the device."""
        self.wait()
        self.now = self.last(self.now) if dist.is_initialized() else self.now
        self.steps.clear()

    def last(self, moment):
        """When the last rank is there."""
        box = torch.tensor([moment], dtype=torch.float64)
        self._all_reduce(box, dist.ReduceOp.MAX)
        return float(box)

    def barrier(self, *args, **kwargs):
        self._barrier(*args, **kwargs)
        self.sync()
        self.now = self.last(self.now)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self._all_reduce(tensor, op, group)
        arrived = Work(self, self.last(self.reached()))
        return arrived if async_op else arrived.wait()

    def sum(self, buffer, group=None):
        """A bucket begins to travel when the last rank has it, behind those before it."""
        done = self._sum(buffer, group)
        done.wait()
        self.ends["link"] = max(self.ends["link"], self.last(self.reached())) + SUM
        return Bucket(self, done)


@dataclass
class Work:
    """A collective that the stream waits for."""

    device: FakeDevice
    moment: float

    def wait(self):
        self.device.wait_for(self.moment)


@dataclass
class Bucket:
    """A sum on its way; callbacks come at once, and what they queue comes behind it."""

    device: FakeDevice
    done: torch.futures.Future

    def then(self, callback):
        with self.device.on("link"):
            return self.done.then(callback)


class Batch(tuple):
    """Rows that are copied to the device when a front end moves them there."""

    device, seconds = None, 0.0

    def to(self, *_, **__):
        if self.device is not None:
            self.device.copy(self.seconds)
        return self


class Source:
    """Collates batches; each takes a while on the host.

    Args:
        device: of this process.
        seconds: that a batch takes.
        copy: seconds of the copy to the device, for which the host waits.
    """

    def __init__(self, device, seconds, *, copy=0.0):
        self.device, self.seconds, self.copy = device, seconds, copy

    def __call__(self, rows):
        batch = Batch(torch.utils.data.default_collate(rows))
        if self.copy:
            batch.device, batch.seconds = self.device, self.copy
        self.device.host(self.seconds)
        return batch
