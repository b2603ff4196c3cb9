"""Tables of a report about workers: who they are, what they do in a step, and what others would change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.report.analysis import PHASES, RunFigures, WorkerFigures
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.what_if import WhatIf
from lightning_hetero.report.series import MOST_WORKERS, shown_workers
from lightning_hetero.report.values import Cell, number, plain

__all__ = [
    "Table",
    "device_of",
    "hardware_table",
    "ranks_text",
    "sizes_text",
    "what_if_table",
    "worker_name",
    "worker_table",
]

MOST_ROWS = 60
"""Rows of a table."""


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Args:
        header: names of the columns.
        rows: cells.
        note: a line below it.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def device_of(run: RunRecord, rank: int) -> str:
    """Return the name of a worker's device, empty if it is not known."""
    workers = run.header.workers
    return plain(workers[rank].device or workers[rank].identity, 60) if 0 <= rank < len(workers) else ""


def worker_name(run: RunRecord, rank: int) -> str:
    """Return a worker's rank and device; the rank -1 is the link that all share."""
    if rank < 0:
        return "link"
    device = device_of(run, rank)
    return f"rank {rank} ({device})" if device else f"rank {rank}"


def worker_table(figures: RunFigures) -> Table:
    """Return what each worker does in a step at the end; of many, some, and the mean of the others."""
    shown = shown_workers(figures)
    rows = [_worker_row(figures, figures.workers[rank]) for rank in shown] if figures.workers else []
    others = [one for one in figures.workers if one.rank not in set(shown)]
    note = ""
    if others:
        rows.append(_mean_row(others))
        note = (
            f"Shown are the {MOST_WORKERS // 2} workers that are busy longest and the "
            f"{MOST_WORKERS - MOST_WORKERS // 2} that wait longest; the last row is the mean of all others."
        )
    header = ("rank", "device", "samples", "share", "samples/s", "idle", *PHASES, "waiting", "bound")
    return Table(header, tuple(rows), note)


def _worker_row(figures: RunFigures, one: WorkerFigures) -> tuple[Cell, ...]:
    key = f"worker.{one.rank}"
    return (
        str(one.rank),
        device_of(figures.run, one.rank),
        number(f"{key}.size", one.size, "count"),
        number(f"{key}.share", one.share, "share"),
        number(f"{key}.rate", one.rate, "rate"),
        number(f"{key}.idle", one.idle, "share"),
        *(number(f"{key}.{name}", one.phases[name], "seconds") for name in PHASES),
        number(f"{key}.waiting", one.waiting, "seconds"),
        "no bound" if one.max_local is None else number(f"{key}.max_local", one.max_local, "count"),
    )


def _mean_row(others: Sequence[WorkerFigures]) -> tuple[Cell, ...]:
    def mean(name: str, values: Sequence[float], kind: str) -> Cell:
        return number(f"others.{name}", float(np.mean(values)), kind)

    return (
        f"{len(others)} others",
        "",
        mean("size", [one.size for one in others], "number"),
        mean("share", [one.share for one in others], "share"),
        mean("rate", [one.rate for one in others], "rate"),
        mean("idle", [one.idle for one in others], "share"),
        *(mean(name, [one.phases[name] for one in others], "seconds") for name in PHASES),
        mean("waiting", [one.waiting for one in others], "seconds"),
        "",
    )


def hardware_table(run: RunRecord) -> Table:
    """Return the devices, those of one kind in one row."""
    memory = run.end.memory if run.end and len(run.end.memory) == run.workers else (math.nan,) * run.workers
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, one in enumerate(run.header.workers):
        bounds = (one.min_local, one.max_local)
        kinds.setdefault((one.device, one.identity, repr(one.capacity), *bounds), []).append(rank)
    rows: list[tuple[Cell, ...]] = []
    for ranks in list(kinds.values())[:MOST_ROWS]:
        one, key = run.header.workers[ranks[0]], f"hardware.{ranks[0]}"
        used = [memory[rank] for rank in ranks if math.isfinite(memory[rank])]
        rows.append(
            (
                ranks_text(ranks),
                plain(one.device, 80),
                plain(one.identity, 80),
                number(f"{key}.capacity", one.capacity, "flops"),
                number(f"{key}.min_local", one.min_local, "count"),
                "no bound" if one.max_local is None else number(f"{key}.max_local", one.max_local, "count"),
                number(f"{key}.memory", max(used, default=math.nan), "bytes"),
            )
        )
    more = len(kinds) - len(rows)
    header = ("ranks", "device", "identity", "peak", "least samples", "most samples", "memory used")
    return Table(header, tuple(rows), f"{more} more kinds of devices are in the record." if more else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in order, those in a row as a range.

    Example:
        >>> ranks_text([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return ", ".join(texts) if len(texts) <= 12 else f"{', '.join(texts[:12])} and {len(texts) - 12} more ranges"


def sizes_text(sizes: Sequence[float], by_cost: bool = False) -> str:
    """Return samples of all workers, or shares of the work by cost; of many, how often each number is there.

    Example:
        >>> sizes_text((3, 1)), sizes_text((2,) * 20 + (1,) * 4)
        ('3 1', '20 x 2, 4 x 1')
    """
    if by_cost:
        return sizes_text([float(f"{100 * size / max(sum(sizes), 1):.3g}") for size in sizes]) + " % of the work"
    if len(sizes) <= MOST_WORKERS:
        return " ".join(map(str, sizes))
    values, counts = np.unique(sizes, return_counts=True)
    order = sorted(zip(counts.tolist(), values.tolist(), strict=True), reverse=True)
    more = f", and {len(order) - 6} more sizes" if len(order) > 6 else ""
    return ", ".join(f"{count} x {value}" for count, value in order[:6]) + more


def what_if_table(run: RunRecord, found: Sequence[WhatIf]) -> Table:
    """Return what leaving out, adding and not bounding workers gives; workers of equal rows share one."""
    groups: dict[tuple[object, ...], list[WhatIf]] = {}
    for one in found:
        times = f"{one.step_time:.6g}"
        groups.setdefault((one.change, device_of(run, one.rank), times), []).append(one)
    order = sorted(groups.values(), key=lambda group: (group[0].change, -group[0].gain))
    by_change = {change: [group for group in order if group[0].change == change] for change in CHANGES}
    rows: list[tuple[Cell, ...]] = []
    for change, groups_of_it in by_change.items():
        for group in groups_of_it[: MOST_ROWS // len(CHANGES)]:
            one = group[0]
            key = f"what_if.{change.replace(' ', '_')}.{one.rank}"
            rows.append(
                (
                    CHANGES[change].format(worker_name(run, one.rank)),
                    ranks_text([each.rank for each in group]) if len(group) > 1 else str(one.rank),
                    number(f"{key}.step_time", one.step_time, "seconds"),
                    number(f"{key}.gain", one.gain, "gain"),
                )
            )
    note = "" if sum(map(len, by_change.values())) == len(rows) else "Shown are the largest gains of each change."
    return Table(("change", "holds for rank", "step time", "speed"), tuple(rows), note)


CHANGES = {
    "without": "without {}",
    "one more like": "one more worker like {}",
    "no bound on": "no memory bound on {}",
}
"""Words for the changes that :func:`~lightning_hetero.core.report.what_if.what_if` tries."""


def best_change(run: RunRecord, found: Sequence[WhatIf]) -> str:
    """Return what the table says in one sentence, empty if there is nothing to say."""
    without = [one for one in found if one.change == "without" and one.gain > 0]
    if not without:
        return "" if not found else "No worker makes the job slower: without any of them, a step would take longer."
    best = max(without, key=lambda one: one.gain)
    gain = f"{100 * best.gain:.1f} %"
    return f"{worker_name(run, best.rank)} makes the job slower: without it, training would be {gain} faster."
