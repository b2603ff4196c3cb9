"""Timer of each step on one rank, without synchronization: the worker's own time, apart from its waiting for others.

A step is cut at the seams that every front end has: fetch, forward, backward, gradient buckets, optimizer, end of step.
``a`` is everything but the backward pass and waiting for others: the wait for data, the optimizer, and the rest, which
counts as forward. ``P`` runs from the start of the backward pass to the last gradient. The time from there until the
backward call returns is synchronization; only the part that the slowest rank sees is due to the network.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.timing.clock import Clock, Mark
from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings
from lightning_hetero.comm.timing.step_marks import BackwardMarks, BatchMarks, Span, StepMarks
from lightning_hetero.comm.timing.step_rows import StepRows
from lightning_hetero.comm.timing.warm_up import WarmUp
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations

__all__ = ["StepTimer", "TimedIterator"]

Array = npt.NDArray[np.float64]


@checked_keywords
class StepTimer:
    """Marks of the parts of each step, made into one row of seconds per synchronized step when a sync round asks.

    Args:
        clock: marks moments on this rank's device.
        cores: CPU quota of this rank, ``None`` without one; with it, times are those that the quota sustains.
        processor_time: returns the CPU seconds of this process; called only with a quota.
        settings: which steps count, and how many are kept.

    Attributes:
        synced_steps: synchronized steps so far.
        buckets: most gradient buckets of a step so far.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        cores: float | None = None,
        processor_time: Callable[[], float] = time.process_time,
        settings: TimingSettings = SETTINGS,
    ) -> None:
        self.clock = clock
        self.synced_steps = self.buckets = 0
        self._rows, self._warm_up = StepRows(clock, cores, settings), WarmUp(settings)
        self._processor_time = processor_time if cores is not None else None
        self._processor_began: float | None = None
        self._began = 0.0  # host time of the running step, loading left out
        self._window: list[BatchMarks] = []
        self._batch: BatchMarks | None = None
        self._update: tuple[Mark, int] | None = None  # start of the running optimizer step, spans excluded by then
        self._last_sync: Mark = None
        self._fetched: Span | None = None
        self._excluding = self._discard = False

    # seams, in the order of a step

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Take the next batch, timing how long the device had nothing to do before it was there.

        A host that is ahead of its device loads while the device works, and may wait for the device here (a blocking
        copy of the batch). Neither shows between two marks on the device.
        """
        begin = self.clock.mark()
        if self._processor_time is not None and self._processor_began is None:
            self._processor_began = self._processor_time()
        batch = next(iterator)
        self._fetched = begin, self.clock.mark()
        return batch

    def begin_step(self, size: int, *, regular: bool, work: tuple[float, ...] = (), planned: int | None = None) -> None:
        """Begin a micro-batch of ``size`` samples; if it is not ``regular`` (ragged tail), its step gives no row.

        Args:
            size: samples of the batch, or those that the plan gives it if ``work`` says how much it is.
            regular: whether the times of the step may be used.
            work: features of the batch's work, as many as :meth:`measure_work` has announced.
            planned: where sizes vary under one plan, the size that it gives, whose changes the device warms up to.
        """
        fetched, self._fetched, self._update = self._fetched, None, None
        if not self._window:
            self._began = time.perf_counter()
        start = self.clock.mark() if fetched is None else fetched[1]
        self._batch = BatchMarks(size, fetched, start, [], [], [], [], [], [], work)
        if self._processor_time is not None and self._processor_began is None:
            self._processor_began = self._processor_time()
        settled = size if planned is None else planned
        if settled != self._warm_up.size:
            self._warm_up.change_size(settled)
        self._discard |= not regular

    def begin_backward(self) -> None:
        """Begin a backward pass, or go on with one that failed: DDP waits for the buckets that are missing."""
        batch = self._batch
        if batch is None or (batch.backwards and not batch.backwards[-1].ends):
            return
        start = self.clock.mark()
        processor = [] if self._processor_time is None else [self._processor_time()]
        batch.backwards.append(BackwardMarks(start, [], {}, [], processor, [], []))

    def end_backward(self) -> None:
        """End the backward pass that began last; one that failed has no end."""
        batch = self._batch
        if batch is None or not batch.backwards:
            return
        end, passage = self.clock.mark(), batch.backwards[-1]
        passage.ends.append(end)
        if self._processor_time is not None and not passage.ready:
            passage.processor.append(self._processor_time())
        if self._update is not None:  # inside the optimizer's closure: the update itself only begins now
            self._update = end, len(batch.excluded)

    def bucket_ready(self) -> int | None:
        """Mark that a gradient bucket is complete; return its number within the backward pass."""
        batch = self._batch
        if batch is None or not batch.backwards:
            return None
        passage = batch.backwards[-1]
        passage.ready.append(self.clock.mark())
        passage.waited.append(len(passage.waits))
        if self._processor_time is not None:
            passage.processor.append(self._processor_time())
        return len(passage.ready) - 1

    def bucket_done(self, number: int | None) -> None:
        """Mark that a gradient bucket is averaged."""
        if number is not None and self._batch is not None and self._batch.backwards:
            self._batch.backwards[-1].done[number] = self.clock.mark()

    def begin_update(self) -> None:
        """Begin an optimizer step; if it has a closure, it counts from the end of the last backward pass in it."""
        if self._batch is not None:
            self._update = self.clock.mark(), len(self._batch.excluded)

    def end_update(self) -> None:
        """End the optimizer step; one that failed has no end."""
        if self._batch is not None and self._update is not None:
            start, excluded = self._update
            self._batch.updates.append((start, self.clock.mark(), self._batch.excluded[excluded:]))
            self._update = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude a collective outside the backward pass (a reduced metric) from the computing time: it is waiting.

        Over NCCL the device may wait while the host goes on, and a barrier makes the host wait for its own device. A
        nested span is part of the outer one.
        """
        batch = self._batch
        if batch is None or self._excluding:
            yield
            return
        self._excluding, begin = True, self.clock.mark()
        try:
            yield
        finally:
            self._excluding = False
            batch.excluded.append((begin, self.clock.mark()))

    @property
    def excluding(self) -> bool:
        """``True`` inside :meth:`excluded`."""
        return self._excluding

    @property
    def in_forward(self) -> bool:
        """``True`` from the begin of a micro-batch until its first backward pass."""
        return self._batch is not None and not self._batch.backwards

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a collective of a sharded model, or inside the hook of a bucket, as synchronization.

        Each of these collectives waits for the slowest worker. Without this context, a fast worker would seem as slow.
        """
        batch = self._batch
        if batch is None or self._excluding:
            yield
            return
        inside = bool(batch.backwards) and not batch.backwards[-1].ends
        spans = batch.backwards[-1].waits if inside else batch.waits
        self._excluding, begin = True, self.clock.mark()
        try:
            yield
        finally:
            self._excluding = False
            spans.append((begin, self.clock.mark()))

    def reduced(self) -> None:
        """Note that the backward pass that ended last has averaged the gradients of a sharded model.

        It counts as one bucket, ready at its end. What it waited for before is left out (:meth:`waiting`).
        """
        if self._batch is not None and self._batch.backwards and self._batch.backwards[-1].ends:
            passage = self._batch.backwards[-1]
            passage.ready.append(passage.ends[-1])
            passage.waited.append(len(passage.waits))

    def end_step(self) -> bool:
        """End the micro-batch and the optimizer step, if there was one; return whether gradients were averaged."""
        batch, self._batch = self._batch, None
        if batch is None:
            return False
        end = self.clock.mark()
        batch.ends.append(end)
        for passage in batch.backwards:
            if not passage.ends:  # the pass failed, and the loop goes on
                passage.ends.append(end)
                self._discard = True
        if self._processor_time is not None:
            now = self._processor_time()
            batch.processor.append(now - (now if self._processor_began is None else self._processor_began))
            self._processor_began = now
        self._window.append(batch)
        synced = [passage for passage in batch.backwards if passage.ready]
        if not synced:
            return False
        self._end_window(synced[-1])
        return True

    def _end_window(self, synced: BackwardMarks) -> None:
        """End a synchronized step; keep its marks unless it is a warm-up step or discarded."""
        self.synced_steps += 1
        self.buckets = max(self.buckets, len(synced.ready))
        left_out = self._warm_up.settling and self._warm_up.end_step(time.perf_counter() - self._began)
        if not (left_out or self._discard):
            self._rows.pending.append(StepMarks(self.synced_steps, self._window, synced, self._last_sync))
        self._window, self._last_sync, self._discard = [], synced.ends[-1], False

    def interrupt(self) -> None:
        """Note that something other than a step runs now (validation, a sync round): the next step time is unknown."""
        self._last_sync = self._processor_began = None

    def discard(self) -> None:
        """Leave the running step out, because it also did something else (an evaluation inside the loop)."""
        if self._batch is not None:
            self._discard = True
        self.interrupt()

    # sync rounds

    def shorten_warm_up(self) -> None:
        """Time the second step already; the same on all ranks."""
        self._warm_up.shorten()

    def measure_work(self, features: int) -> None:
        """Report ``features`` numbers of each step's work beside its times; the same on all ranks."""
        self._rows.measure_work(features)

    @property
    def change_cost(self) -> float | None:
        """Seconds by which the first step with a new size takes longer than the next; ``None`` before two were seen."""
        return self._warm_up.change_cost

    @property
    def rows(self) -> deque[Array]:
        """Rows since the last :meth:`take` whose marks the device has reached."""
        return self._rows.made()

    def take(self) -> Array:
        """Return the rows since the last call, newest last: step number, fields, ends of the buckets.

        The shape is ``(max_steps, 10 + buckets + features)``, where ``buckets`` is the largest number in a step so far
        and ``features`` that of :meth:`measure_work`, both equal on all ranks. Unused places are NaN.
        """
        return self._rows.take(self.buckets)

    def pack(self) -> Array:
        """Return the rows since the last sync round, flat."""
        return self.take().ravel()

    def unpack(self, everyone: Array, control: ControlPlane) -> None:
        """Match the rows of all ranks, each packed by :meth:`pack`.

        A rank whose host is far ahead of its device reports steps a sync round later than the other ranks, which pack
        their rows of such steps again.
        """
        self._rows.match(everyone.reshape(len(everyone), self._rows.settings.max_steps, -1))

    @property
    def matched(self) -> StepObservations:
        """The steps of the newest sync round that all ranks have timed."""
        return self._rows.matched


class TimedIterator:
    """Iterator that times how long it waits for each batch.

    Args:
        iterator: gives batches.
        timer: times them.
    """

    def __init__(self, iterator: Iterator[Any], timer: StepTimer) -> None:
        self._iterator, self._fetch = iterator, timer.fetch

    def __iter__(self) -> "TimedIterator":
        return self

    def __next__(self) -> Any:
        return self._fetch(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
