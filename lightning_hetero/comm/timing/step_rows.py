"""Rows of seconds, one per synchronized step, made of its marks when a sync round asks for them.

Each wait of a worker is the span between two marks on its device. The host may wait while the device works, and the
device may wait while the host goes on; only the device's time is part of the step.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings
from lightning_hetero.comm.timing.step_marks import BatchMarks, Span, StepMarks
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cpu_quota import quota_limited_times

__all__ = ["StepRows", "common_steps", "match_rows", "row_of"]

Array = npt.NDArray[np.float64]

FIELDS = len(StepObservations.FIELDS)
ENDS = FIELDS + 3
"""Index of the bucket ends in a row: after the step number, the fields, and two numbers of CPU time."""
OUTSIDE = [1 + StepObservations.FIELDS.index(name) for name in ("data_wait", "forward", "optimizer")]


class StepRows:
    """Marks of a rank's newest steps, and the rows that are made of them.

    Rows are numbered by synchronized steps, which all ranks count alike. Rows of different ranks can thus be matched,
    although one device may report its steps later than another.

    Args:
        clock: clock of the marks.
        cores: CPU quota of this rank, ``None`` without one.
        settings: how many steps are kept.

    Attributes:
        pending: steps without a row so far.
        matched: steps of the newest sync round that all ranks have timed.
        features: numbers that describe the work of a step, at the end of each row.
    """

    def __init__(self, clock: Clock, cores: float | None, settings: TimingSettings = SETTINGS) -> None:
        self.clock, self.cores, self.settings = clock, cores, settings
        self.pending: deque[StepMarks] = deque(maxlen=settings.max_steps)
        self._rows: deque[Array] = deque(maxlen=settings.max_steps)
        self._taken: list[Array] = []
        self.matched = StepObservations.empty(1)
        self.features = 0

    def measure_work(self, features: int) -> None:
        """Report ``features`` numbers of each step's work; rows of steps that had none are dropped."""
        if features != self.features:
            self.features = features
            self.pending.clear()
            self._rows.clear()

    def made(self) -> deque[Array]:
        """Return the rows since the last :meth:`take` whose marks the device has reached."""
        while self.pending and self._reached(self.pending[0].window):
            self._rows.append(row_of(self.clock, self.pending.popleft()))
        return self._rows

    def _reached(self, window: list[BatchMarks]) -> bool:
        return all(self.clock.ready(mark) for batch in window for mark in batch.last_marks)

    def take(self, buckets: int) -> Array:
        """Return the rows since the last call, newest last: step number, fields, ends of ``buckets`` buckets."""
        table = np.full((self.settings.max_steps, FIELDS + 1 + buckets + self.features), np.nan)
        taken = list(self.made())
        if taken:
            rows = np.stack([row[:ENDS] for row in taken])
            if self.cores is not None:
                sustain(rows, self.cores)
            table[-len(rows) :, : FIELDS + 1] = rows[:, : FIELDS + 1]
            for place, row in zip(table[-len(rows) :, FIELDS + 1 :], taken, strict=True):
                ends = row[ENDS : len(row) - self.features]
                place[: len(ends)], place[buckets:] = ends, row[len(row) - self.features :]
        self._taken = taken
        self._rows.clear()
        return table

    def match(self, tables: Array) -> None:
        """Match the rows of all ranks, given as for :func:`match_rows`, and keep later rows for the next round."""
        self.put_back(max(common_steps(tables), default=0.0))
        self.matched = match_rows(tables, self.features)

    def put_back(self, after: float) -> None:
        """Put rows of the last :meth:`take` back whose steps come after ``after``; the next one returns them again."""
        rows = [*(row for row in self._taken if row[0] > after), *self._rows]
        self._rows, self._taken = deque(rows, maxlen=self.settings.max_steps), []


def row_of(clock: Clock, step: StepMarks) -> Array:
    """Return the row of a step: its number, the fields of its observation, CPU seconds, bucket ends, its mean work.

    Args:
        clock: clock of the marks, all of which must be ready.
        step: its marks. In the row of a sharded model, all that it waited for is the synchronization of one bucket.
    """
    between, window, last = clock.seconds, step.window, step.synced

    def total(spans: Iterable[Span]) -> float:
        return sum(between(start, end) for start, end in spans)

    n = len(window)
    forward = backward = optimizer = waited = 0.0
    for batch in window:
        update = sum(between(start, end) - total(excluded) for start, end, excluded in batch.updates)
        passes = total((b.start, b.ends[-1]) for b in batch.backwards)
        forward += between(batch.start, batch.ends[-1]) - passes - update - total(batch.excluded)
        optimizer += update
        backward += total((b.start, b.ready[-1] if b.ready else b.ends[-1]) for b in batch.backwards)
        outside, inside = total(batch.waits), sum(total(b.inner_waits) for b in batch.backwards)
        forward, backward, waited = forward - outside, backward - inside, waited + outside + inside
    before = [total(last.waits[:number]) for number in last.waited]
    ready = [between(last.start, mark) - wait for mark, wait in zip(last.ready, before, strict=True)]
    ends = [last.done.get(i, last.ends[-1]) for i in range(len(ready))]
    done = [between(last.start, end) - wait for end, wait in zip(ends, [*before[1:], before[-1]], strict=True)]
    done[-1] += waited
    sync = [done[i] - max(ready[i], done[i - 1] if i else ready[i]) for i in range(len(ready))]
    fields = [
        window[-1].size,
        max(forward, 0.0) / n,
        backward / n,
        ready[0],
        max(sum(sync[:-1]), 0.0),
        max(sync[-1], 0.0),
        between(step.previous, last.ends[-1]) if step.previous is not None else float("nan"),
        total(batch.fetched for batch in window if batch.fetched is not None) / n,
        max(optimizer, 0.0) / n,
    ]
    work = [sum(values) / n for values in zip(*(batch.work for batch in window), strict=True)]
    return np.array([step.number, *fields, *processor_seconds(window), *done, *work])


def processor_seconds(window: list[BatchMarks]) -> tuple[float, float]:
    """Return the mean CPU seconds of a micro-batch outside its backward passes and inside them."""
    backward = sum(passage.processor_seconds for batch in window for passage in batch.backwards)
    return (sum(sum(batch.processor) for batch in window) - backward) / len(window), backward / len(window)


def sustain(rows: Array, cores: float) -> None:
    """Replace observed times by those that a CPU quota sustains, per batch size; see :func:`quota_limited_times`."""
    for size in set(rows[:, 1]):
        same = rows[:, 1] == size
        backward, own_outside, own_backward = rows[same][:, [3, FIELDS + 1, FIELDS + 2]].T
        outside = rows[same][:, OUTSIDE].sum(axis=1)
        lasting, rows[same, 3] = quota_limited_times(outside, backward, own_outside, own_backward, cores)
        rows[np.ix_(same, OUTSIDE)] *= (lasting / np.maximum(outside, 1e-12))[:, None]
        rows[same, 4] *= rows[same, 3] / np.maximum(backward, 1e-12)


def common_steps(tables: Array) -> list[float]:
    """Return the numbers of the steps that every rank has reported, sorted; tables as for :func:`match_rows`."""
    numbers = tables[:, :, 0]
    steps, ranks = np.unique(numbers[~np.isnan(numbers)], return_counts=True)  # a rank reports a step once
    return [float(step) for step in steps[ranks == len(tables)]]


def match_rows(tables: Array, features: int = 0) -> StepObservations:
    """Return the observations of all ranks for the steps that every rank has reported.

    Args:
        tables: :meth:`~lightning_hetero.comm.timing.step_timer.StepTimer.take` of every rank, shape
            ``(ranks, max_steps, 10 + buckets + features)``.
        features: numbers of a step's work.
    """
    steps, ranks, numbers = common_steps(tables), np.arange(len(tables)), tables[:, :, 0].copy()
    values = np.empty((len(steps), len(tables), tables.shape[2] - 1))
    for row, step in zip(values, steps, strict=True):
        row[:] = tables[ranks, (numbers == step).argmax(axis=1), 1:]
    return StepObservations.from_array(values, features)
