"""Placement of sampled steps on a time base that all ranks share.

Each rank measures durations with its own clock; none of them says when something began. What all ranks share is the end
of a synchronization: the last bucket's all-reduce ends at the same instant on all of them. From these instants ``E``,
the parts of a step are placed as follows. The sampled steps of a round are taken to follow each other.

1. ``step_time`` leads from the ``E`` of the step before to this one's; the median over ranks counts. Where it is not
   known, the step follows the one before without a gap, as soon as the last rank allows.
2. The last backward pass begins so long before ``E`` as the end of its last bucket says. It takes ``backward`` seconds,
   but no longer than until ``E``.
3. Before it come, from the last to the first micro-batch, the forward pass, the data, and the backward pass of the
   micro-batch before. All micro-batches of an accumulation window are taken as equally long, as the record has their
   mean. What the last backward pass had no room for goes to the passes before it.
4. The optimizer's step begins at ``E``; it takes time from the step that follows.
5. A bucket's all-reduce begins on a rank when the bucket is ready there and the one before is done; so it includes
   waiting for other ranks. The first bucket is ready after ``first_bucket`` seconds of the backward pass, the last one
   at its end. The record does not say when those between are ready: they are taken to be at equal distances, but no
   later than when they are averaged.
6. What remains of the time from ``E`` to ``E`` is waiting: after the backward pass for other ranks until the last of
   them is ready, then for the link; before the data, for whatever the record does not name.

Parts that do not fit between two ``E``, because of a CPU quota or because clocks differ, are shortened alike.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.report.records import RoundRecord

__all__ = ["Span", "place_steps"]

Array = npt.NDArray[np.float64]

LEAST = 1e-9
"""Seconds of the shortest part, a nanosecond as in the trace; what is shorter is rounding."""
FIELDS = {name: i for i, name in enumerate(RoundRecord.SAMPLED)}


@dataclass(frozen=True)
class Span:
    """Part of a step on one rank, in seconds of the shared time base.

    Args:
        rank: the rank.
        row: ``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"waiting"`` or ``"all-reduce"``.
        start: when it begins.
        end: when it ends.
        name: what it is, where the row does not say it.
        bucket: number of the bucket of an all-reduce.
        step: number of the step in the sample.
    """

    rank: int
    row: str
    start: float
    end: float
    name: str = ""
    bucket: int = -1
    step: int = 0


@dataclass(frozen=True)
class _Sample:
    """One worker's part of a sampled step: all seconds of its micro-batches together, and the ends of its buckets."""

    data: float
    forward: float
    backward: float
    optimizer: float
    first_bucket: float
    step_time: float
    ends: tuple[float, ...]
    count: int

    @property
    def end(self) -> float:
        """Seconds from the start of the last backward pass to the end of the synchronization."""
        return self.ends[-1]

    @property
    def before(self) -> float:
        """Seconds that the rank is busy before its last backward pass."""
        return self.data + self.forward + self.backward - self.last_pass

    @property
    def last_pass(self) -> float:
        """Seconds of the last backward pass."""
        return min(self.passes, self.end)

    @property
    def passes(self) -> float:
        """Mean seconds of a micro-batch's backward passes."""
        return self.backward / self.count


def _sample_of(row: Sequence[float], count: int) -> _Sample | None:
    """Return what a sampled row says, ``None`` if something of it is not known."""
    if len(row) < len(FIELDS):
        return None
    field = {name: float(row[i]) for name, i in FIELDS.items()}
    ends = tuple(float(value) for value in row[len(FIELDS) :] if math.isfinite(value))
    if not ends:
        ends = (field["backward"] + field["overlapped_sync"] + field["last_sync"],)
    busy = [field[name] for name in ("data", "forward", "backward", "optimizer")]
    if not all(math.isfinite(value) and value >= 0 for value in (*busy, ends[-1])):
        return None
    first = field["first_bucket"] if math.isfinite(field["first_bucket"]) else busy[2]
    data, forward, backward, optimizer = (count * value for value in busy)
    rising = tuple(np.maximum.accumulate(ends).tolist())
    return _Sample(data, forward, backward, optimizer, max(first, 0.0), field["step_time"], rising, count)


def place_steps(one: RoundRecord, begin: float) -> list[Span]:
    """Place the sampled steps of a round, so that the last one ends when the round begins.

    Args:
        one: the round.
        begin: second before which nothing may be placed, the end of the round before; if the steps do not fit behind
            it, they all come later.

    Returns:
        Spans, those of a rank and row in order and without overlap; none if the round has no usable sample.

    Example:
        >>> row = 8, 0.03, 0.06, 0.06, 0.0, 0.01, 0.1, 0.0, 0.0, 0.07
        >>> one = RoundRecord(5.0, 0, 9, 10, 8, (8,), sample=((row,),))
        >>> [(span.row, round(span.start, 3), round(span.end, 3)) for span in place_steps(one, 0.0)][:3]
        [('forward', 4.9, 4.93), ('backward', 4.93, 4.99), ('all-reduce', 4.99, 5.0)]
    """
    steps = [[_sample_of(row, one.accumulation) for row in step] for step in one.sample]
    usable = [[row for row in step if row is not None] for step in steps if step and None not in step]
    usable = [step for step in usable if len(step) == len(usable[0])]
    if not usable:
        return []
    spans: list[Span] = []
    updates, since = [0.0] * len(usable[0]), 0.0
    for number, step in enumerate(usable):
        end, known = _end_of(step, since, updates, first=number == 0)
        for rank, row in enumerate(step):
            spans += _placed(row, rank, number, since if known else math.nan, end, updates[rank], step)
        since, updates = end, [row.optimizer for row in step]
    last = since + max(updates)
    spans += [
        Span(rank, "optimizer", since, since + length, step=len(usable) - 1) for rank, length in enumerate(updates)
    ]
    shift = max(one.time - last, begin - min(span.start for span in spans))
    return [_moved(span, shift) for span in spans if span.end - span.start >= LEAST]


def _moved(span: Span, shift: float) -> Span:
    return Span(span.rank, span.row, span.start + shift, span.end + shift, span.name, span.bucket, span.step)


def _end_of(step: Sequence[_Sample], since: float, updates: Sequence[float], *, first: bool) -> tuple[float, bool]:
    """Return when a step's synchronization ends, and whether that of the step before is known to be its beginning."""
    lengths = [row.step_time for row in step if math.isfinite(row.step_time) and row.step_time > 0]
    if lengths and not first:
        return since + float(np.median(lengths)), True
    needed = max(update + row.before + row.end for row, update in zip(step, updates, strict=True))
    return since + needed, not first


def _placed(
    row: _Sample, rank: int, number: int, since: float, end: float, update: float, step: Sequence[_Sample]
) -> Iterator[Span]:
    """Yield the parts of a step on one rank; ``since`` is not a number if what came before is not known."""
    known = math.isfinite(since)
    room = end - since if known else math.inf
    update = min(update, room)
    if known:
        yield Span(rank, "optimizer", since, since + update, step=number - 1)
    begin = max(end - row.end, since + update) if known else end - row.end
    passed = begin - since - update if known else math.inf
    shrink = min(passed / row.before, 1.0) if row.before > 0 else 1.0
    start = begin - shrink * row.before
    if known and start > since + update:
        yield Span(rank, "waiting", since + update, start, "waiting", step=number)
    yield from _micro_batches(row, rank, number, start, begin, shrink)
    stop = min(begin + row.last_pass, end)
    yield Span(rank, "backward", begin, stop, step=number)
    yield from _all_reduces(row, rank, number, begin, stop, end)
    yield from _waits(rank, number, stop, end, step)


def _micro_batches(row: _Sample, rank: int, number: int, start: float, begin: float, shrink: float) -> Iterator[Span]:
    """Yield what comes before the last backward pass: data and forward of each micro-batch, backward of all but one."""
    now, data, forward = start, shrink * row.data / row.count, shrink * row.forward / row.count
    passes = max(row.count - 1, 1)
    backward = shrink * (row.backward - row.last_pass) / passes
    for i in range(row.count):
        last = i == row.count - 1
        alone = row.count == 1 and backward > 0  # several passes in one batch: those before the last one
        yield Span(rank, "data", now, min(now + data, begin), step=number)
        now = min(now + data, begin)
        middle = begin if last and not alone else min(now + forward, begin)
        yield Span(rank, "forward", now, middle, step=number)
        now = middle
        if not last or alone:
            until = begin if alone else min(now + backward, begin)
            yield Span(rank, "backward", now, until, step=number)
            now = until


def _all_reduces(row: _Sample, rank: int, number: int, begin: float, stop: float, end: float) -> Iterator[Span]:
    """Yield the all-reduce of each bucket, from when it is ready on this rank and the one before is done."""
    shift, before, count = end - row.end, -math.inf, len(row.ends)
    first = min(begin + row.first_bucket, stop)
    for i, done in enumerate(row.ends):
        ready = stop if i == count - 1 else first + (stop - first) * i / (count - 1)
        until = end if i == count - 1 else min(max(shift + done, begin), end)
        start = min(max(ready, before), until)
        yield Span(rank, "all-reduce", start, until, bucket=i, step=number)
        before = until


def _waits(rank: int, number: int, stop: float, end: float, step: Sequence[_Sample]) -> Iterator[Span]:
    """Yield the waiting after the backward pass: for the rank that is ready last, and then for the link."""
    ready = [end - each.end + each.last_pass for each in step]
    last = int(np.argmax(ready))
    others = min(max(ready[last], stop), end) if last != rank else stop
    if others > stop:
        yield Span(rank, "waiting", stop, others, f"waiting for rank {last}", step=number)
    if end > others:
        yield Span(rank, "waiting", others, end, "waiting for the link", step=number)
