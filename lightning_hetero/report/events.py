"""Tables of a report about what happened when: changes of the split, why it stayed, stragglers, and the run itself."""

import math
from collections.abc import Mapping
from datetime import datetime, timezone

from lightning_hetero.core.report.lost_time import straggler_spans
from lightning_hetero.core.report.records import ChangeRecord, GainRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report.series import StepAxis
from lightning_hetero.report.tables import MOST_ROWS, Table, sizes_text, worker_name
from lightning_hetero.report.values import Cell, number, plain

__all__ = ["change_table", "gain_of", "kept_table", "pair_table", "run_table", "straggler_table"]


def gain_of(run: RunRecord, change: ChangeRecord) -> GainRecord | None:
    """Return the measured gain of a change, ``None`` if it was not measured."""
    place = change.epoch, change.step
    return next((one for one in reversed(run.gains) if (one.epoch, one.step) == place), None)


def change_table(run: RunRecord) -> Table:
    """Return the changes of the plan with their reasons, and what each was measured to gain; the newest last."""
    first, axis = max(len(run.changes) - MOST_ROWS, 0), StepAxis(run)
    rows: list[tuple[Cell, ...]] = []
    for i, one in enumerate(run.changes[first:], first):
        key, gain = f"change.{i}", gain_of(run, one)
        rows.append(
            (
                number(f"{key}.step", axis.at(one.epoch, one.step), "count"),
                f"{one.epoch}:{one.step}",
                plain(one.reason),
                sizes_text(one.sizes, run.header.by_cost),
                number(f"{key}.predicted", one.predicted, "seconds"),
                number(f"{key}.before", gain.before if gain else math.nan, "seconds"),
                number(f"{key}.after", gain.after if gain else math.nan, "seconds"),
            )
        )
    note = f"{first} earlier changes are in the record." if first else ""
    what = "work" if run.header.by_cost else "samples"
    header = ("step", "epoch:step", "reason", f"{what} of each worker", "predicted", "measured before", "and after")
    return Table(header, tuple(rows), note)


def kept_table(run: RunRecord) -> Table:
    """Return why the split stayed, one row for rounds in succession with the same reason; the newest last."""
    spans: list[tuple[float, float, str]] = []
    begin, open_span = 0.0, False
    for end, one in zip(StepAxis(run).ends, run.rounds, strict=True):
        if one.kept and open_span and spans[-1][2] == one.kept:
            spans[-1] = spans[-1][0], float(end), one.kept
        elif one.kept:
            spans.append((begin, float(end), one.kept))
        begin, open_span = float(end), bool(one.kept)
    first = max(len(spans) - MOST_ROWS, 0)
    rows = tuple(
        (number(f"kept.{i}.from", low, "count"), number(f"kept.{i}.to", high, "count"), plain(reason))
        for i, (low, high, reason) in enumerate(spans[first:], first)
    )
    return Table(
        ("from step", "to step", "why the split stays"), rows, f"{first} earlier rows are left out." if first else ""
    )


RELIEVED = {
    "split": "by a new split",
    "recovered": "it recovered",
    "others": "others are slower now",
    "slower": "it became slower still",
    "run ended": "it lasted until the run ended",
    "": "unknown",
}
"""Words for how a straggler ended."""


def straggler_table(run: RunRecord) -> Table:
    """Return each straggler: since when, until when, what it costs, and how it ended; the newest last."""
    every = straggler_spans(run)
    first, axis = max(len(every) - MOST_ROWS, 0), StepAxis(run)
    rows: list[tuple[Cell, ...]] = []
    for i, one in enumerate(every[first:], first):
        key, begin, end = f"straggler.{i}", one.begin, one.end
        rows.append(
            (
                worker_name(run, one.known.rank),
                plain(one.known.phase),
                "" if begin is None else number(f"{key}.from", axis.at(begin.epoch, begin.step), "count"),
                "to the end" if end is None else number(f"{key}.to", axis.at(end.epoch, end.step), "count"),
                number(f"{key}.cost", one.known.cost, "seconds"),
                number(f"{key}.lost", one.total, "seconds"),
                "it did not end" if end is None else RELIEVED.get(end.relieved, plain(end.relieved)),
            )
        )
    note = f"{first} earlier stragglers are in the record." if first else ""
    header = ("worker", "phase", "from step", "to step", "adds to a step", "others waited", "how it ended")
    return Table(header, tuple(rows), note)


def run_table(run: RunRecord) -> Table:
    """Return what ran, where, and how it ended."""
    header, end = run.header, run.end
    last = max([0.0, *(one.time for one in run.rounds), *([end.time] if end else [])])
    steps = end.steps if end else sum(one.count for one in run.rounds)
    rows: list[tuple[Cell, ...]] = [
        ("started", _moment(header.started)),
        ("ended", plain(end.status) if end else "no end is recorded: the run was killed, or it still runs"),
        ("recorded time", number("run.time", last, "seconds")),
        ("synchronized steps", number("run.steps", steps, "count")),
        ("of which after the last sync round", number("run.unseen", run.unseen, "count")),
        ("sync rounds recorded", number("run.rounds", len(run.rounds), "count")),
        ("workers", number("run.workers", run.workers, "count")),
        ("total batch at the start", number("run.total_batch_size", header.total_batch_size, "count")),
        ("front end", plain(header.front_end)),
        ("strategy, policy", f"{plain(header.strategy, 80)}, {plain(header.policy, 80)}"),
        ("lightning-hetero", plain(header.package, 80)),
        ("host of rank 0", plain(header.hostname) or "unknown"),
    ]
    if end:
        rows.append(("recording took", number("run.overhead", end.overhead, "seconds")))
        if end.dropped:
            rows.append(
                ("lines left out to save time or to bound the file", number("run.dropped", end.dropped, "count"))
            )
    if run.damaged:
        rows.append(("lines that could not be read", number("run.damaged", run.damaged, "count")))
    return Table(("", ""), tuple(rows))


def _moment(seconds: float) -> str:
    """Return a Unix time as text, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "unknown"


def pair_table(pairs: Mapping[str, str], names: tuple[str, str]) -> Table:
    """Return names and their values, in order of the names."""
    rows = tuple((plain(name, 80), plain(value)) for name, value in sorted(pairs.items())[: 2 * MOST_ROWS])
    return Table(names, rows)
