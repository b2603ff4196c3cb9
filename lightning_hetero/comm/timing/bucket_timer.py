"""Timer of gradient buckets: when each is ready, and how long the all-reduces of a step keep the link busy."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.clock import Clock, Mark
from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings

__all__ = ["BucketTimer", "busy_seconds", "combine"]

Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Transfer:
    """One all-reduce in flight."""

    bucket: int
    start: Mark
    end: Mark = None

    def arrive(self, mark: Mark) -> None:
        """Note the mark of its arrival."""
        self.end = mark


@dataclass(slots=True)
class _Step:
    """Marks of one backward pass."""

    number: int
    ready: list[Mark] = field(default_factory=list)
    released: list[Mark] = field(default_factory=list)
    transfers: list[_Transfer] = field(default_factory=list)

    @property
    def marks(self) -> list[Mark]:
        """Marks whose passing shows that the step is over."""
        return [*self.released, *(transfer.end for transfer in self.transfers)]


class BucketTimer:
    """Marks of the buckets of each step and of their transfers on one rank, without synchronization.

    Args:
        clock: marks moments on this rank's device.
        settings: how many steps are kept.
    """

    def __init__(self, clock: Clock, settings: TimingSettings = SETTINGS) -> None:
        self.clock, self.settings = clock, settings
        self._steps: deque[_Step] = deque(maxlen=settings.max_steps)
        self._count = 0
        self._reported = 0

    def ready(self, index: int) -> Callable[[], None]:
        """Mark a bucket as ready (0 begins a step); call the result when the optimizer may have it."""
        if index == 0:
            self._count += 1
            self._steps.append(_Step(self._count))
        step = self._steps[-1]
        step.ready.append(self.clock.mark())
        return lambda: step.released.append(self.clock.mark())

    def gap(self) -> None:
        """Count a step that is not measured."""
        self._count += 1
        self._steps.append(_Step(self._count))

    def send(self) -> Callable[[], None]:
        """Mark the start of the all-reduce of the newest ready bucket; call the result when it has arrived."""
        return self.sender()()

    def sender(self) -> Callable[[], Callable[[], None]]:
        """Return :meth:`send` for the newest ready bucket, to be called when its all-reduce really begins."""
        step = self._steps[-1]
        bucket = len(step.ready) - 1

        def send() -> Callable[[], None]:
            transfer = _Transfer(bucket, self.clock.mark())
            step.transfers.append(transfer)
            return lambda: transfer.arrive(self.clock.mark())

        return send

    def spans(self) -> list[tuple[int, int, float, float, float]]:
        """Return step, bucket, and seconds from the step's first bucket until it was ready, sent and received.

        The list holds all transfers of the newest ``max_steps`` steps that have arrived on this rank, in the order of
        sending.
        """
        found = []
        for step in self._steps:
            for transfer in step.transfers:
                marks = (step.ready[0], step.ready[transfer.bucket], transfer.start, transfer.end)
                if transfer.end is not None and all(map(self.clock.ready, marks)):
                    ready, start, end = (self.clock.seconds(marks[0], mark) for mark in marks[1:])
                    found.append((step.number, transfer.bucket, ready, start, end))
        return found

    def take(self, buckets: int) -> Array:
        """Return the steps with exactly ``buckets`` buckets since the last call.

        Returns:
            shape ``(max_steps, 2 + buckets)``: number of the step, seconds that its all-reduces kept the link busy,
            seconds from the end of the previous synchronization until each bucket was ready. Unused rows are NaN.
        """
        table = np.full((self.settings.max_steps, 2 + buckets), np.nan)
        row = 0
        for before, step in pairwise(self._steps):
            if step.number > self._reported and self._whole(before, buckets) and self._whole(step, buckets):
                table[row] = [step.number, self._busy(before, step), *self._ready(before, step)]
                self._reported, row = step.number, row + 1
        return table

    def _whole(self, step: _Step, buckets: int) -> bool:
        lengths = {len(step.ready), len(step.released), len(step.transfers)}
        return lengths == {buckets} and all(mark is not None and self.clock.ready(mark) for mark in step.marks)

    def _busy(self, before: _Step, step: _Step) -> float:
        between, origin = self.clock.seconds, before.ready[0]
        until = max(between(origin, transfer.end) for transfer in before.transfers)
        return busy_seconds([(between(origin, t.start), between(origin, t.end)) for t in step.transfers], until)

    def _ready(self, before: _Step, step: _Step) -> list[float]:
        between, origin = self.clock.seconds, before.ready[0]
        end = max(between(origin, mark) for mark in (*before.released, before.ready[-1]))
        return [between(origin, mark) - end for mark in step.ready]


def busy_seconds(spans: list[tuple[float, float]], until: float = -float("inf")) -> float:
    """Return the seconds after ``until`` that are covered by at least one span.

    Example:
        >>> busy_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
        4.0
        >>> busy_seconds([(0.0, 2.0), (1.0, 3.0)], until=2.5)
        0.5
    """
    total = 0.0
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def combine(tables: Array) -> tuple[float, Array] | None:
    """Return medians over the common steps of all ranks: busy seconds of the link, and when each bucket is ready.

    The busy time of a step is the shortest that any rank saw: the rank that came last waits for nobody, the others also
    wait for it. A bucket is ready when it is ready on the slowest rank.

    Args:
        tables: :meth:`BucketTimer.take` of every rank, shape ``(ranks, max_steps, 2 + buckets)``.

    Returns:
        Seconds, and seconds per bucket in increasing order; ``None`` if there is no common step.
    """
    steps = [set(table[np.isfinite(table[:, 0]), 0].tolist()) for table in tables]
    common = sorted(set.intersection(*steps))
    if not common:
        return None
    rows = np.array([[table[table[:, 0] == number][0, 1:] for table in tables] for number in common])
    busy = float(np.median(rows[:, :, 0].min(axis=1)))
    ready = np.median(rows[:, :, 1:].max(axis=1), axis=0)
    return busy, np.maximum.accumulate(np.maximum(ready, 0.0))
