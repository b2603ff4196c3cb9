"""Trace of sampled steps in Chrome's JSON format, which https://ui.perfetto.dev and ``chrome://tracing`` open."""

from collections.abc import Iterator
from typing import Any

from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report.step_layout import Span, place_steps
from lightning_hetero.report.tables import device_of, sizes_text, worker_name
from lightning_hetero.report.values import plain

__all__ = ["trace_events"]

ROWS = ("data", "forward", "backward", "optimizer", "waiting")
"""Rows of a rank, above those of the buckets."""
COLORS = {"data": "yellow", "forward": "thread_state_running", "backward": "thread_state_runnable", "waiting": "grey"}


def trace_events(run: RunRecord) -> dict[str, Any]:
    """Return the sampled steps of a run as a trace: one process per rank, with a row for each part of a step.

    The time base is the run's: 0 is its beginning. How steps are placed on it is said in
    :mod:`~lightning_hetero.report.step_layout`. Changes of the plan and stragglers are marks over all processes, and
    the samples of each rank a counter of its process.

    Returns:
        A dictionary to be written as JSON.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> trace_events(RunRecord(RunHeader(0.0, "0.2.0", "Trainer", "hetero_ddp", "pid", (), 8)))["traceEvents"]
        []
    """
    begin, spans = 0.0, []
    for one in run.rounds:
        placed = place_steps(one, begin)
        spans += [(span, one.epoch, one.step) for span in placed]
        begin = max([one.time, begin, *(span.end for span in placed)])
    ranks = max([run.workers, *(span.rank + 1 for span, _, _ in spans)], default=0)
    buckets = max((span.bucket + 1 for span, _, _ in spans), default=0)
    events = [*_names(run, ranks, buckets if spans else -1), *_marks(run), *_counters(run)]
    events += [_complete(span, epoch, step) for span, epoch, step in spans]
    return {"displayTimeUnit": "ms", "otherData": {"generator": "lightning-hetero"}, "traceEvents": events}


def _complete(span: Span, epoch: int, step: int) -> dict[str, Any]:
    """Return an event with whole nanoseconds, so that parts that follow each other touch and never overlap."""
    start, end = round(1e9 * span.start), round(1e9 * span.end)
    name = span.name or (f"all-reduce {span.bucket}" if span.row == "all-reduce" else span.row)
    event = {
        **{"ph": "X", "cat": span.row, "name": name, "pid": span.rank, "tid": _row(span)},
        **{"ts": start / 1e3, "dur": (end - start) / 1e3},
        "args": {"sampled step": span.step, "epoch of the round": epoch, "step of the round": step},
    }
    return {**event, "cname": COLORS[span.row]} if span.row in COLORS else event


def _row(span: Span) -> int:
    return len(ROWS) + span.bucket if span.row == "all-reduce" else ROWS.index(span.row)


def _names(run: RunRecord, ranks: int, buckets: int) -> Iterator[dict[str, Any]]:
    rows = [*ROWS, *(f"all-reduce of bucket {i}" for i in range(buckets))]
    for rank in range(ranks):
        device = device_of(run, rank)
        yield _named("process_name", rank, 0, name=f"rank {rank}: {device}" if device else f"rank {rank}")
        yield _named("process_sort_index", rank, 0, sort_index=rank)
        for i, row in enumerate(rows if buckets >= 0 else ()):
            yield _named("thread_name", rank, i, name=row)
            yield _named("thread_sort_index", rank, i, sort_index=i)


def _named(what: str, rank: int, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": args}


def _marks(run: RunRecord) -> Iterator[dict[str, Any]]:
    by_cost = run.header.by_cost
    marks = [(one.time, f"change to {sizes_text(one.sizes, by_cost)}", plain(one.reason)) for one in run.changes]
    for each in run.stragglers:
        marks.append((each.time, f"straggler {plain(each.event)}: {worker_name(run, each.rank)}", plain(each.phase)))
    for time, name, why in marks:
        yield {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": 0, "ts": 1e6 * time, "args": {"why": why}}


def _counters(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the samples of each rank where they change."""
    before: tuple[float, ...] = ()
    for one in run.rounds:
        for rank, size in enumerate(one.ran):
            if not before or before[rank] != size:
                event = {"ph": "C", "name": "samples", "pid": rank, "tid": 0}
                yield {**event, "ts": 1e6 * one.time, "args": {"samples": size}}
        before = one.ran
