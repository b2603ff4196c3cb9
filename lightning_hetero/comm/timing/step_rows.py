"""What the marks of a step make of it: one row of seconds, and rows of all ranks matched.

Everything that a worker waits for is the span between two marks on its device. A host that waits may do so while the
device works, and a device that waits may do so while the host goes on; only what the device saw is part of the step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cpu_quota import quota_limited_times

__all__ = [
    "BackwardMarks",
    "BatchMarks",
    "common_steps",
    "compute_seconds",
    "match_rows",
    "processor_seconds",
    "row_of",
    "sustain",
]

FIELDS = len(StepObservations.FIELDS)
ENDS = FIELDS + 3
"""Place of the ends of the buckets in a row, behind the step number, the fields and two numbers of processor time."""
OUTSIDE = [1 + StepObservations.FIELDS.index(name) for name in ("data_wait", "forward", "optimizer")]
COMPUTE = [*OUTSIDE, 1 + StepObservations.FIELDS.index("backward")]

Span = tuple[Any, Any]


@dataclass(slots=True)
class BackwardMarks:
    """Marks of one backward pass."""

    start: Any
    end: Any = None
    ready: list[Any] = field(default_factory=list)
    done: dict[int, Any] = field(default_factory=dict)
    processor: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class BatchMarks:
    """Marks of one micro-batch.

    Args:
        size: samples.
        fetched: before and after its batch was taken from the loader, ``None`` if nobody saw that.
        start: where it begins.
    """

    size: int
    fetched: Span | None
    start: Any
    end: Any = None
    excluded: list[Span] = field(default_factory=list)
    processor: float = 0.0
    backwards: list[BackwardMarks] = field(default_factory=list)
    update_start: Any = None
    update_excluded: int = 0
    updates: list[tuple[Any, Any, list[Span]]] = field(default_factory=list)

    @property
    def marks(self) -> list[Any]:
        """The last mark of each of its parts; those before lie on the same streams."""
        done = [mark for b in self.backwards for mark in b.done.values()]
        return [self.start, self.end, *(b.end for b in self.backwards), *(u[1] for u in self.updates), *done]

    @property
    def synced(self) -> BackwardMarks:
        """The last backward pass that was synchronised; others may follow it under ``no_sync``."""
        return [passage for passage in self.backwards if passage.ready][-1]


def row_of(clock: Clock, window: list[BatchMarks], previous: Any) -> tuple[list[float], list[float]]:
    """The fields of the observation of a step, and the ends of its buckets.

    Args:
        clock: of the marks, all of which are ready.
        window: its micro-batches.
        previous: end of the synchronisation before, ``None`` if something that is no step came between.
    """
    between = clock.seconds

    def total(spans: Iterable[Span]) -> float:
        return sum(between(start, end) for start, end in spans)

    n = len(window)
    forward = backward = optimizer = 0.0
    for micro in window:
        update = sum(between(start, end) - total(excluded) for start, end, excluded in micro.updates)
        passes = total((b.start, b.end) for b in micro.backwards)
        forward += between(micro.start, micro.end) - passes - update - total(micro.excluded)
        optimizer += update
        backward += total((b.start, b.ready[-1] if b.ready else b.end) for b in micro.backwards)
    last = window[-1].synced
    ready = [between(last.start, mark) for mark in last.ready]
    done = [between(last.start, last.done.get(i, last.end)) for i in range(len(ready))]
    sync = [done[i] - max(ready[i], done[i - 1] if i else ready[i]) for i in range(len(ready))]
    fields = [
        window[-1].size,
        max(forward, 0.0) / n,
        backward / n,
        ready[0],
        max(sum(sync[:-1]), 0.0),
        max(sync[-1], 0.0),
        between(previous, last.end) if previous is not None else float("nan"),
        total(micro.fetched for micro in window if micro.fetched is not None) / n,
        max(optimizer, 0.0) / n,
    ]
    return fields, done


def compute_seconds(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``a + P`` of one row or of several."""
    seconds: npt.NDArray[np.float64] = row[..., COMPUTE].sum(axis=-1)
    return seconds


def processor_seconds(window: list[BatchMarks]) -> tuple[float, float]:
    """Mean processor seconds of a micro-batch outside of its backward pass and in it."""
    backward = sum(end - start for micro in window for start, end in (b.processor for b in micro.backwards))
    return (sum(micro.processor for micro in window) - backward) / len(window), backward / len(window)


def sustain(rows: npt.NDArray[np.float64], cores: float) -> None:
    """Put what a quota allows in place of the observed times, size by size, see :func:`quota_limited_times`."""
    for size in set(rows[:, 1]):
        same = rows[:, 1] == size
        backward, own_outside, own_backward = rows[same][:, [3, FIELDS + 1, FIELDS + 2]].T
        outside = rows[same][:, OUTSIDE].sum(axis=1)
        lasting, rows[same, 3] = quota_limited_times(outside, backward, own_outside, own_backward, cores)
        rows[np.ix_(same, OUTSIDE)] *= (lasting / np.maximum(outside, 1e-12))[:, None]
        rows[same, 4] *= rows[same, 3] / np.maximum(backward, 1e-12)


def common_steps(tables: npt.NDArray[np.float64]) -> list[float]:
    """Numbers of the steps that every rank has reported, in increasing order; tables as for :func:`match_rows`."""
    return sorted(set.intersection(*({float(s) for s in t[:, 0] if not np.isnan(s)} for t in tables)))


def match_rows(tables: npt.NDArray[np.float64]) -> StepObservations:
    """Observations of all ranks for the steps that every rank has reported.

    Args:
        tables: :meth:`~lightning_hetero.comm.timing.step_timer.StepTimer.take` of every rank, shape
            ``(ranks, 32, 10 + buckets)``.
    """
    steps = common_steps(tables)
    rows = [[t[np.flatnonzero(t[:, 0] == step)[0], 1:] for t in tables] for step in steps]
    return StepObservations.from_array(np.array(rows).reshape(len(steps), len(tables), tables.shape[2] - 1))
