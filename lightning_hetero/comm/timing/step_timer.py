"""Timings of each step on one rank, with no synchronisation: what the worker did, apart from what it waited for.

A step is cut at the seams that every front end has: fetch, forward, backward, gradient buckets, optimizer, end of step.
``a`` is all that is neither backward nor waiting for others: waiting for data, the optimizer, and the rest, which is
taken for forward; ``P`` runs from the start of the backward pass to the last gradient; what follows until the backward
call returns is synchronisation, of which only the part that the slowest rank sees is the network's.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.comm.timing.step_rows import (
    ENDS,
    FIELDS,
    BackwardMarks,
    BatchMarks,
    common_steps,
    compute_seconds,
    match_rows,
    processor_seconds,
    row_of,
    sustain,
)
from lightning_hetero.core.observations import StepObservations

__all__ = ["StepTimer"]

WARM_UP = 3
KEPT_ROWS = 32
COLD = 1.5
"""Factor on what a step took before a resume above which one of the first steps after it is not believed."""


class StepTimer:
    """Collects the timings of one rank, one row per synchronised step.

    Rows are numbered by synchronised steps, which all ranks count alike, so that rows of different ranks can be matched
    although a device may report some of them later than another.

    Args:
        clock: marks moments on this rank's device.
        cores: processor quota of this rank, ``None`` without one; with it, times are those that the quota sustains.
        processor_time: processor seconds of this process, read where there is a quota.

    Attributes:
        synced_steps: synchronised steps so far.
        buckets: most gradient buckets of a step so far.
        matched: steps of the newest sync round that all ranks have timed.
    """

    def __init__(
        self, clock: Clock, *, cores: float | None = None, processor_time: Callable[[], float] = time.process_time
    ) -> None:
        self.clock, self.cores = clock, cores
        self._processor_time = processor_time
        self._processor_began: float | None = None
        self.synced_steps = 0
        self.buckets = 0
        self._rows: deque[npt.NDArray[np.float64]] = deque(maxlen=KEPT_ROWS)
        self._skip = WARM_UP
        self._last_size: int | None = None
        self._sizes: set[int] = set()
        self._changed: list[float] | None = None  # seconds of the steps since the size changed to a new one
        self._costs: deque[float] = deque(maxlen=2)
        self._began = 0.0
        self._window: list[BatchMarks] = []
        self._micro: BatchMarks | None = None
        self._pending: deque[tuple[int, list[BatchMarks], Any]] = deque(
            maxlen=KEPT_ROWS
        )  # rows are made when asked for
        self._last_sync: Any = None
        self._fetched: tuple[Any, Any] | None = None
        self._excluding = False
        self._discard = False
        self._taken: list[npt.NDArray[np.float64]] = []
        self._usual: tuple[float, float] | None = None
        self.matched = StepObservations.empty(1)
        self._cold_until = 0

    # seams, in the order of a step

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Take the next batch, timing how long the device had nothing to do before it was there.

        A host that is ahead of its device loads while the device works, and may wait for the device here (a blocking
        copy of the batch). Of that, nothing lies between two marks on the device.
        """
        begin = self.clock.mark()
        if self.cores is not None and self._processor_began is None:
            self._processor_began = self._processor_time()
        batch = next(iterator)
        self._fetched = begin, self.clock.mark()
        return batch

    def begin_step(self, size: int, *, regular: bool) -> None:
        """A micro-batch of ``size`` samples begins; one that is not ``regular`` (ragged tail) gives no row."""
        fetched, self._fetched = self._fetched, None
        if not self._window:
            self._began = time.perf_counter()
        self._micro = BatchMarks(size, fetched, self.clock.mark() if fetched is None else fetched[1])
        if self.cores is not None and self._processor_began is None:
            self._processor_began = self._processor_time()
        if self._last_size is not None and size != self._last_size:
            self._skip, self._changed = max(self._skip, 1), None if size in self._sizes else []
        self._last_size = size
        self._sizes.add(size)
        self._discard |= not regular

    def begin_backward(self) -> None:
        """A backward pass begins."""
        if self._micro is None:
            return
        passage = BackwardMarks(self.clock.mark())
        if self.cores is not None:
            began = self._processor_time()
            passage.processor = began, began
        self._micro.backwards.append(passage)

    def end_backward(self) -> None:
        """The backward pass that began last is over; one that failed has no end."""
        if self._micro is None or not self._micro.backwards:
            return
        passage = self._micro.backwards[-1]
        passage.end = self.clock.mark()
        if self._micro.update_start is not None:  # a closure of the optimizer's: it only begins now
            self._micro.update_start, self._micro.update_excluded = passage.end, len(self._micro.excluded)
        if self.cores is not None and not passage.ready:
            passage.processor = passage.processor[0], self._processor_time()

    def bucket_ready(self) -> int | None:
        """A gradient bucket is complete; returns its number within the backward pass."""
        if self._micro is None or not self._micro.backwards:
            return None
        passage = self._micro.backwards[-1]
        passage.ready.append(self.clock.mark())
        if self.cores is not None:
            passage.processor = passage.processor[0], self._processor_time()
        return len(passage.ready) - 1

    def bucket_done(self, number: int | None) -> None:
        """A gradient bucket is averaged."""
        if number is not None and self._micro is not None and self._micro.backwards:
            self._micro.backwards[-1].done[number] = self.clock.mark()

    def begin_update(self) -> None:
        """An optimizer step begins; if it has a closure, it counts from the end of the last backward pass in it."""
        if self._micro is not None:
            self._micro.update_start, self._micro.update_excluded = self.clock.mark(), len(self._micro.excluded)

    def end_update(self) -> None:
        """The optimizer step is over; one that failed has no end."""
        micro = self._micro
        if micro is not None and micro.update_start is not None:
            micro.updates.append((micro.update_start, self.clock.mark(), micro.excluded[micro.update_excluded :]))
            micro.update_start = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Around a collective outside the backward pass (a metric that is reduced): waiting, not computing.

        Over NCCL the device may wait while the host goes on, and a barrier lets the host wait for its own device. One
        inside another is part of it.
        """
        micro = self._micro
        if micro is None or self._excluding:
            yield
            return
        self._excluding, begin = True, self.clock.mark()
        try:
            yield
        finally:
            self._excluding = False
            micro.excluded.append((begin, self.clock.mark()))

    def end_step(self) -> bool:
        """The micro-batch is over, and with it the optimizer step if there was one: whether gradients were averaged."""
        micro, self._micro = self._micro, None
        if micro is None:
            return False
        micro.end = self.clock.mark()
        for passage in micro.backwards:
            if passage.end is None:  # it failed, and the loop goes on
                passage.end, self._discard = micro.end, True
        if self.cores is not None:
            now = self._processor_time()
            micro.processor = now - (now if self._processor_began is None else self._processor_began)
            self._processor_began = now
        self._window.append(micro)
        if not any(passage.ready for passage in micro.backwards):
            return False
        self.synced_steps += 1
        window, self._window = self._window, []
        sync_end, self.buckets = micro.synced.end, max(self.buckets, len(micro.synced.ready))
        if self._skip == 0 and not self._discard:
            self._pending.append((self.synced_steps, window, self._last_sync))
        self._skip = max(0, self._skip - 1)
        self._last_sync, self._discard = sync_end, False
        self._see_change(time.perf_counter() - self._began)
        return True

    @property
    def change_cost(self) -> float | None:
        """Seconds by which the first step with a new size takes longer than the next; ``None`` before two were seen.

        The lower one of the last two: another process may have run in one of them, or a compiler may have prepared for
        all sizes at once.
        """
        return min(self._costs) if len(self._costs) == self._costs.maxlen else None

    def _see_change(self, seconds: float) -> None:
        """Learn what a change to a new size costs from the first two steps after it, loading left out."""
        if self._changed is None:
            return
        self._changed.append(seconds)
        if len(self._changed) == 2:
            first, second = self._changed
            self._costs.append(max(first - second, 0.0))
            self._changed = None

    def interrupt(self) -> None:
        """Something that is no step happens now (validation, agreement on a plan): the next step time is unknown."""
        self._last_sync = self._processor_began = None

    def discard(self) -> None:
        """The running step did something else as well (an evaluation inside the loop): it gives no row."""
        if self._micro is not None:
            self._discard = True
        self.interrupt()

    # rows

    @property
    def rows(self) -> deque[npt.NDArray[np.float64]]:
        """Rows since the last :meth:`take`, as far as the device has reached their marks."""
        self._resolve()
        return self._rows

    def _resolve(self) -> None:
        while self._pending:
            number, window, previous = self._pending[0]
            if not self._reached(window):
                return
            self._pending.popleft()
            fields, ends = row_of(self.clock, window, previous)
            row = np.array([number, *fields, *processor_seconds(window), *ends])
            if number > self._cold_until or not self._is_cold(row):
                self._rows.append(row)

    def _reached(self, window: list[BatchMarks]) -> bool:
        return all(self.clock.ready(mark) for micro in window for mark in micro.marks if mark is not None)

    def take(self) -> npt.NDArray[np.float64]:
        """Rows since the last call, newest last: step number, fields, ends of the buckets; unused places are NaN.

        The shape is ``(32, 10 + buckets)`` for the most buckets of a step so far, which is equal on all ranks.
        """
        table = np.full((KEPT_ROWS, FIELDS + 1 + self.buckets), np.nan)
        seen = list(self.rows)
        if seen:
            self._usual = self._newest_pace()
            rows = np.stack([row[:ENDS] for row in seen])
            if self.cores is not None:
                sustain(rows, self.cores)
            table[-len(rows) :, : FIELDS + 1] = rows[:, : FIELDS + 1]
            for place, row in zip(table[-len(rows) :, FIELDS + 1 :], seen, strict=True):
                place[: len(row) - ENDS] = row[ENDS:]
        self._taken = seen
        self._rows.clear()
        return table

    def put_back(self, after: float) -> None:
        """Let the next :meth:`take` have those rows again whose steps come after this one: some rank lacks them yet.

        The device of a rank whose host is far ahead reports its steps an interval later than other ranks do theirs.
        """
        rows = [*(row for row in self._taken if row[0] > after), *self._rows]
        self._rows, self._taken = deque(rows, maxlen=KEPT_ROWS), []

    def pack(self) -> npt.NDArray[np.float64]:
        """Return the rows since the last sync round, flat."""
        return self.take().ravel()

    def unpack(self, everyone: npt.NDArray[np.float64], control: ControlPlane) -> None:
        """Match the rows of all ranks: :attr:`matched` are the steps that all of them have timed."""
        tables = everyone.reshape(len(everyone), KEPT_ROWS, -1)
        self.put_back(max(common_steps(tables), default=0.0))
        self.matched = match_rows(tables)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Rows since the last :meth:`take`, numbered back from this step, what the next are measured by, and costs."""
        self.clock.wait()
        rows = [[float(row[0]) - self.synced_steps, *map(float, row[1:])] for row in self.rows]
        usual = self._newest_pace()
        return {
            "rows": rows,
            "buckets": self.buckets,
            "cores": self.cores,
            "skip": self._skip,
            "size": self._last_size,
            "usual": None if usual is None else list(usual),
            "costs": list(self._costs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the middle of an interval, as if there had been no break.

        The first steps of a process take longer than others. Where the state says what steps took, they count unless
        they took half as long again; else they are left out.
        """
        self.buckets = max(self.buckets, int(state["buckets"]))  # on all ranks alike, whatever else is known
        self._costs.extend(map(float, state.get("costs", ())))
        if state["usual"] is None or state["cores"] != self.cores:
            return
        size, seconds = state["usual"]
        self._usual = float(size), float(seconds)
        self._cold_until = self.synced_steps + WARM_UP
        self._skip, self._last_size = int(state["skip"]), state["size"]
        self._rows.extend(np.array([row[0] + self.synced_steps, *row[1:]]) for row in state["rows"])

    def _newest_pace(self) -> tuple[float, float] | None:
        """The newest size that was observed, and what a step of it takes to compute."""
        if not self._rows:
            return self._usual
        rows = np.stack([row[:ENDS] for row in self._rows])
        same = rows[rows[:, 1] == rows[-1, 1]]
        return float(rows[-1, 1]), float(np.median(compute_seconds(same)))

    def _is_cold(self, row: npt.NDArray[np.float64]) -> bool:
        """Whether a step took longer than could be by what steps took before; time grows no faster than the size."""
        assert self._usual is not None
        size, seconds = self._usual
        return bool(compute_seconds(row) > COLD * seconds * max(row[1] / size, 1.0))
