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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.clock import Clock
from lightning_hetero.core.network_bound import LONG, LongWait
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.pace import sustained

__all__ = ["StepObserver", "match_rows"]

WARM_UP = 3
KEPT_ROWS = 32
KEPT_LONG = 4
"""Of these rows, those of before the newest ones that waited long for gradients."""
COLD = 1.5
"""Factor on what a step took before a resume above which one of the first steps after it is not believed."""
FIELDS = len(StepObservations.FIELDS)
ENDS = FIELDS + 3
"""Place of the ends of the buckets in a row, behind the step number, the fields and two numbers of processor time."""
OUTSIDE = [1 + StepObservations.FIELDS.index(name) for name in ("data_wait", "forward", "optimizer")]
BACKWARD, LAST_SYNC = (1 + StepObservations.FIELDS.index(name) for name in ("backward", "last_sync"))
COMPUTE = [*OUTSIDE, BACKWARD]


@dataclass(slots=True)
class _Backward:
    """Marks of one backward pass."""

    start: Any
    end: Any = None
    ready: list[Any] = field(default_factory=list)
    done: dict[int, Any] = field(default_factory=dict)
    processor: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class _Micro:
    """Marks of one micro-batch."""

    size: int
    wait_for_data: float
    start: Any
    end: Any = None
    excluded: float = 0.0
    processor: float = 0.0
    backwards: list[_Backward] = field(default_factory=list)
    update_start: Any = None
    update_excluded: float = 0.0
    updates: list[tuple[Any, Any, float]] = field(default_factory=list)

    @property
    def marks(self) -> list[Any]:
        done = [mark for b in self.backwards for mark in b.done.values()]
        return [self.start, self.end, *(b.end for b in self.backwards), *(u[1] for u in self.updates), *done]

    @property
    def synced(self) -> _Backward:
        """The last backward pass that was synchronised; others may follow it under ``no_sync``."""
        return [passage for passage in self.backwards if passage.ready][-1]


class StepObserver:
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
        long_wait: the newest step, if it waited long for gradients and the device has told so already.
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
        self._window: list[_Micro] = []
        self._micro: _Micro | None = None
        self._pending: deque[tuple[int, list[_Micro], Any]] = deque(maxlen=KEPT_ROWS)  # rows are made when asked for
        self._last_sync: Any = None
        self._fetched_at: Any = None
        self._data_seconds = 0.0
        self._discard = False
        self._usual: tuple[float, float] | None = None
        self._cold_until = 0
        self.long_wait: LongWait | None = None
        self._long: deque[npt.NDArray[np.float64]] = deque(maxlen=KEPT_LONG)
        self._ended, self._took = float("nan"), float("inf")  # of the step before; a first one has none

    # seams, in the order of a step

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Take the next batch, timing how long the data took."""
        begin = time.perf_counter()
        if self.cores is not None and self._processor_began is None:
            self._processor_began = self._processor_time()
        batch = next(iterator)
        self._data_seconds = time.perf_counter() - begin
        self._fetched_at = self.clock.mark()
        return batch

    def begin_step(self, size: int, *, regular: bool) -> None:
        """A micro-batch of ``size`` samples begins; one that is not ``regular`` (ragged tail) gives no row."""
        start = self._fetched_at if self._fetched_at is not None else self.clock.mark()
        self._micro = _Micro(size, self._data_seconds, start)
        self._fetched_at, self._data_seconds = None, 0.0
        if self.cores is not None and self._processor_began is None:
            self._processor_began = self._processor_time()
        if self._last_size is not None and size != self._last_size:
            self._skip = max(self._skip, 1)
        self._last_size = size
        self._discard |= not regular

    def begin_backward(self) -> None:
        """A backward pass begins."""
        if self._micro is None:
            return
        passage = _Backward(self.clock.mark())
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
            self._micro.update_start, self._micro.update_excluded = passage.end, self._micro.excluded
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
            self._micro.update_start, self._micro.update_excluded = self.clock.mark(), self._micro.excluded

    def end_update(self) -> None:
        """The optimizer step is over; one that failed has no end."""
        micro = self._micro
        if micro is not None and micro.update_start is not None:
            micro.updates.append((micro.update_start, self.clock.mark(), micro.excluded - micro.update_excluded))
            micro.update_start = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Around a collective outside the backward pass (a metric that is reduced): waiting, not computing."""
        begin = time.perf_counter()
        yield
        if self._micro is not None:
            self._micro.excluded += time.perf_counter() - begin

    def end_step(self) -> bool:
        """The micro-batch is over, and with it the optimizer step if there was one: whether gradients were averaged."""
        micro, self._micro = self._micro, None
        if micro is None:
            return False
        micro.end = self.clock.mark()
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
        usable = not self._discard and len({m.size for m in window}) == 1 and self._skip == 0
        if usable:
            self._pending.append((self.synced_steps, window, self._last_sync))
        self._skip = max(0, self._skip - 1)
        self._last_sync, self._discard = sync_end, False
        ended, before = time.perf_counter(), self._took
        self._took, self._ended = ended - self._ended, ended
        self.long_wait = self._see_long(window, min(self._took, before)) if self._took > LONG else None
        return True

    def _see_long(self, window: list[_Micro], seconds: float) -> LongWait | None:
        """A long step is over: keep its row from being pushed out by those that follow, and see what it waited for."""
        last = window[-1].synced
        if not self._reached(window):
            return None
        waited = max(self.clock.seconds(last.ready[-1], mark) for mark in last.done.values() or [last.end])
        if waited <= LONG:
            return None
        self._resolve()
        fields = self._row(window, None)[0]
        return LongWait(waited, len(window) * sum(fields[place - 1] for place in COMPUTE), seconds)

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
            fields, ends = self._row(window, previous)
            row = np.array([number, *fields, *_processor(window), *ends])
            if number > self._cold_until or not self._is_cold(row):
                if len(self._rows) == KEPT_ROWS and _waited(self._rows[0]) > LONG:
                    self._long.append(self._rows[0])
                self._rows.append(row)

    def _kept(self) -> list[npt.NDArray[np.float64]]:
        rows = list(self.rows)
        return [*self._long, *rows[max(0, len(rows) + len(self._long) - KEPT_ROWS) :]]

    def _reached(self, window: list[_Micro]) -> bool:
        return all(self.clock.ready(mark) for micro in window for mark in micro.marks if mark is not None)

    def _row(self, window: list[_Micro], previous: Any) -> tuple[list[float], list[float]]:
        """The fields of the observation, and the ends of the buckets."""
        between = self.clock.seconds
        n = len(window)
        forward = backward = optimizer = 0.0
        for micro in window:
            spans = sum(between(b.start, b.end) for b in micro.backwards)
            update = sum(between(start, end) - excluded for start, end, excluded in micro.updates)
            forward += between(micro.start, micro.end) - spans - update - micro.excluded
            optimizer += update
            backward += sum(between(b.start, b.ready[-1] if b.ready else b.end) for b in micro.backwards)
        last = window[-1].synced
        ready = [between(last.start, mark) for mark in last.ready]
        done = [between(last.start, last.done.get(i, last.end)) for i in range(len(ready))]
        sync = [done[i] - max(ready[i], done[i - 1] if i else ready[i]) for i in range(len(ready))]
        step = between(previous, last.end) if previous is not None else float("nan")
        fields = [
            window[-1].size,
            max(forward, 0.0) / n,
            backward / n,
            ready[0],
            max(sum(sync[:-1]), 0.0),
            max(sync[-1], 0.0),
            step,
            sum(micro.wait_for_data for micro in window) / n,
            max(optimizer, 0.0) / n,
        ]
        return fields, done

    def take(self) -> npt.NDArray[np.float64]:
        """Rows since the last call, newest last: step number, fields, ends of the buckets; unused places are NaN.

        The shape is ``(32, 10 + buckets)`` for the most buckets of a step so far, which is equal on all ranks. They are
        the newest, but for up to four older ones that waited long for gradients.
        """
        table = np.full((KEPT_ROWS, FIELDS + 1 + self.buckets), np.nan)
        seen = self._kept()
        if seen:
            self._usual = self._newest_pace()
            rows = np.stack([row[:ENDS] for row in seen])
            if self.cores is not None:
                _sustain(rows, self.cores)
            table[-len(rows) :, : FIELDS + 1] = rows[:, : FIELDS + 1]
            for place, row in zip(table[-len(rows) :, FIELDS + 1 :], seen, strict=True):
                place[: len(row) - ENDS] = row[ENDS:]
        self._rows.clear()
        self._long.clear()
        return table

    # state

    def state_dict(self) -> dict[str, Any]:
        """Rows since the last :meth:`take`, numbered back from this step, and what the next steps are measured by."""
        self.clock.wait()
        rows = [[float(row[0]) - self.synced_steps, *map(float, row[1:])] for row in self._kept()]
        usual = self._newest_pace()
        return {
            "rows": rows,
            "buckets": self.buckets,
            "cores": self.cores,
            "skip": self._skip,
            "size": self._last_size,
            "usual": None if usual is None else list(usual),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the middle of an interval, as if there had been no break.

        The first steps of a process take longer than others. Where the state says what steps took, they count unless
        they took half as long again; else they are left out.
        """
        self.buckets = max(self.buckets, int(state["buckets"]))  # on all ranks alike, whatever else is known
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
        return float(rows[-1, 1]), float(np.median(same[:, COMPUTE].sum(axis=1)))

    def _is_cold(self, row: npt.NDArray[np.float64]) -> bool:
        """Whether a step took longer than could be by what steps took before; time grows no faster than the size."""
        assert self._usual is not None
        size, seconds = self._usual
        return bool(row[COMPUTE].sum() > COLD * seconds * max(row[1] / size, 1.0))


def _waited(row: npt.NDArray[np.float64]) -> float:
    """Seconds from the last gradient to the end of the last bucket."""
    return max(float(row[LAST_SYNC]), float(np.nanmax(row[ENDS:], initial=0.0)) - float(row[BACKWARD]))


def _processor(window: list[_Micro]) -> tuple[float, float]:
    """Mean processor seconds of a micro-batch outside of its backward pass and in it."""
    backward = sum(end - start for micro in window for start, end in (b.processor for b in micro.backwards))
    return (sum(micro.processor for micro in window) - backward) / len(window), backward / len(window)


def _sustain(rows: npt.NDArray[np.float64], cores: float) -> None:
    """Put the times that a quota sustains in place of the observed ones, size by size, see :func:`sustained`."""
    for size in set(rows[:, 1]):
        same = rows[:, 1] == size
        backward, own_outside, own_backward = rows[same][:, [3, FIELDS + 1, FIELDS + 2]].T
        outside = rows[same][:, OUTSIDE].sum(axis=1)
        lasting, rows[same, 3] = sustained(outside, backward, own_outside, own_backward, cores)
        rows[np.ix_(same, OUTSIDE)] *= (lasting / np.maximum(outside, 1e-12))[:, None]
        rows[same, 4] *= rows[same, 3] / np.maximum(backward, 1e-12)


def match_rows(tables: npt.NDArray[np.float64]) -> StepObservations:
    """Observations of all ranks for the steps that every rank has reported.

    Args:
        tables: :meth:`StepObserver.take` of every rank, shape ``(ranks, 32, 10 + buckets)``.
    """
    common: set[float] = set.intersection(*({float(s) for s in t[:, 0] if not np.isnan(s)} for t in tables))
    steps = sorted(common)
    rows = [[t[np.flatnonzero(t[:, 0] == step)[0], 1:] for t in tables] for step in steps]
    return StepObservations.from_array(np.array(rows).reshape(len(steps), len(tables), tables.shape[2] - 1))
