"""Summary of a recorded run in words and one table: the verdict first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_hetero.core.batching.plan import split_text
from lightning_hetero.core.report.advice import advice
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.limit import limit_of
from lightning_hetero.core.report.lost_time import straggler_spans
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.rounded import rounded

__all__ = ["Summary", "summary_of"]

COLUMNS = ("rank", "device", "samples", "samples/s", "busy", "waits", "memory")
MAX_ROWS = 16
"""Most workers that the table shows: of more, those with the least waiting, which the others wait for."""


@dataclass(frozen=True)
class Summary:
    """Summary of a run.

    Args:
        verdict: one line.
        columns: heads of the table.
        rows: one row of text per worker.
        lines: steps, decisions, stragglers and advice, a sentence each.

    Example:
        >>> print(Summary("1.84x over even sizes", ("rank", "waits"), (("0", "4 %"), ("10", "3 %")), ("done",)).text())
        1.84x over even sizes
          rank  waits
             0    4 %
            10    3 %
        done
    """

    verdict: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]

    def text(self) -> str:
        """Return all of it as plain text."""
        table = [self.columns, *self.rows] if self.rows else []
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))] if table else []
        drawn = ["  " + "  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)) for row in table]
        return "\n".join([self.verdict, *drawn, *self.lines])


def summary_of(run: RunRecord) -> Summary:
    """Return the summary of a run.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> summary_of(RunRecord(RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8))).verdict
        'hetero_ddp: no step was timed, so nothing can be said about its speed'
    """
    figures = RunFigures(run)
    if not figures.last:
        verdict = f"{run.header.strategy}: no step was timed, so nothing can be said about its speed"
        return Summary(verdict, COLUMNS, (), tuple(_ending(run)))
    return Summary(verdict_of(figures), COLUMNS, tuple(_rows(figures)), tuple(_lines(figures)))


def verdict_of(figures: RunFigures) -> str:
    """Return the verdict on a run with timed steps.

    Example:
        >>> from lightning_hetero.core.report.records import RoundRecord, RunHeader
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> busy = {"data": (0.0, 0.0), "forward": (0.03, 0.03), "backward": (0.06, 0.06), "optimizer": (0.0, 0.0)}
        >>> one = RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=0.1, even=0.184, link=0.01, **busy)
        >>> verdict_of(RunFigures(RunRecord(header, (one,))))
        'hetero_ddp: 1.84x over even sizes (predicted); 10 % idle; limited by: computing, balanced over all workers'
    """
    speed = figures.over or f"speed over {figures.baseline} unknown"
    idle = f"{100 * figures.idle:.0f} % idle"
    return f"{figures.run.header.strategy}: {speed}; {idle}; limited by: {limit_of(figures)}"


def _rows(figures: RunFigures) -> Iterator[tuple[str, ...]]:
    header, end = figures.run.header, figures.run.end
    shown = sorted(figures.workers, key=lambda one: one.idle)[:MAX_ROWS]
    for one in sorted(shown, key=lambda one: one.rank):
        device = header.workers[one.rank].device if one.rank < len(header.workers) else ""
        used = end.memory[one.rank] if end is not None and one.rank < len(end.memory) else math.nan
        memory = "" if math.isnan(used) else f"{used / 1e9:.1f} GB"
        bound = "" if one.max_local is None or one.max_local >= NO_BOUND else f" (<= {one.max_local})"
        yield (
            str(one.rank),
            device[:28],
            f"{one.size:.1f}".removesuffix(".0") + f" ({100 * one.share:.0f} %)",
            rounded(one.rate, 4),
            f"{rounded(one.compute * 1e3, 4)} ms",
            f"{rounded(one.waiting * 1e3)} ms ({100 * one.idle:.0f} %)",
            f"{memory}{bound}",
        )


NO_BOUND = 2**31
UNSEEN = 0.05
"""Share of the steps after the last sync round from which the summary says so."""


def _lines(figures: RunFigures) -> Iterator[str]:
    run = figures.run
    if len(figures.workers) > MAX_ROWS:
        yield f"({len(figures.workers) - MAX_ROWS} workers more, which wait longer than these)"
    yield _step(figures)
    changed = [one for one in run.changes if one.reason]
    if run.gains:
        gain = run.gains[-1]
        predicted = f" (predicted {rounded(gain.predicted * 1e3, 4)})" if math.isfinite(gain.predicted) else ""
        times = f"{rounded(gain.before * 1e3, 4)} -> {rounded(gain.after * 1e3, 4)} ms{predicted}"
        yield f"newest measured change: step {times} at epoch {gain.epoch} step {gain.step}"
    if changed:
        newest = changed[-1]
        sizes = split_text(newest.sizes, run.header.by_cost, MAX_ROWS)
        count = f"{len(changed)} change{'s' * (len(changed) > 1)} of the plan"
        yield f"{count}, the newest to {sizes}: {newest.reason}"
    kept = [one.kept for one in run.rounds if one.kept]
    if kept:
        yield f"the split stays: {kept[-1]}"
    spans = straggler_spans(run)
    if spans:
        worst = max(spans, key=lambda one: one.total)
        who = "the link" if worst.known.rank < 0 else f"rank {worst.known.rank} ({worst.known.phase})"
        yield f"{len(spans)} straggler{'s' * (len(spans) > 1)}, {rounded(figures.lost)} s lost; most by {who}"
    for text in advice(figures):
        yield f"next: {text}"
    yield from _ending(run)


def _step(figures: RunFigures) -> str:
    before, now = figures.step_time_before, figures.step_time
    text = at_end = f"{rounded(now * 1e3, 4)} ms"
    if math.isfinite(before) and len(figures.first) < len(figures.timed):
        text = f"{rounded(before * 1e3, 4)} ms with {figures.baseline} until the first change, {at_end} at the end"
    if math.isfinite(figures.predicted):
        text += f" (predicted {rounded(figures.predicted * 1e3, 4)})"
    if math.isfinite(figures.share_of_optimum):
        text += f", {100 * figures.share_of_optimum:.1f} % of the optimum"
    return f"step: {text}"


def _ending(run: RunRecord) -> Iterator[str]:
    if run.end is not None and run.unseen > UNSEEN * run.end.steps:
        yield f"the last {run.unseen} of {run.end.steps} steps are not in these figures: no sync round followed them"
    if run.end is not None and run.end.status != "finished":
        yield f"ended early: {run.end.status}"
