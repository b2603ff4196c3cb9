"""Comparison of two runs: their figures beside each other, and whether the second is slower than a limit allows."""

import math
from dataclasses import dataclass
from typing import Any

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report.series import share_of_solo
from lightning_hetero.report.tables import worker_name
from lightning_hetero.report.values import number, plain
from lightning_hetero.simulate.planning.tables import table

__all__ = ["ComparedFigure", "Comparison", "compare_runs", "compared_text"]

MOST_WORKERS = 40
"""Workers whose rates are compared one by one."""


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of both runs.

    Args:
        name: what it is.
        kind: its unit, as for :func:`~lightning_hetero.report.values.number`.
        a: that of the first run, NaN if it is not known.
        b: that of the second one.
        comparable: whether the runs are alike enough that its ratio says something.
    """

    name: str
    kind: str
    a: float
    b: float
    comparable: bool = True

    @property
    def ratio(self) -> float:
        """Second over first, NaN if it says nothing."""
        known = self.comparable and math.isfinite(self.a) and math.isfinite(self.b) and self.a > 0
        return self.b / self.a if known else math.nan


@checked_keywords
@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs.

    Args:
        figures: figures of both.
        notes: in what the runs differ, and what that means for the comparison.
    """

    figures: tuple[ComparedFigure, ...]
    notes: tuple[str, ...]

    @property
    def rate(self) -> ComparedFigure:
        """Samples per second."""
        return next(one for one in self.figures if one.name == "rate")

    @property
    def regression(self) -> float:
        """Share by which the second run is slower, by samples/s; negative if it is faster, NaN if it is not known."""
        return 1.0 - self.rate.ratio

    def exceeds(self, limit: float) -> bool:
        """Return whether the second run is slower by more than a share."""
        return self.regression > limit

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, ``None`` for what is not known."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        figures = {
            one.name: {"unit": UNITS[one.kind], "a": finite(one.a), "b": finite(one.b), "ratio": finite(one.ratio)}
            for one in self.figures
        }
        return {"regression": finite(self.regression), "figures": figures, "notes": list(self.notes)}


UNITS = {"seconds": "s", "rate": "samples/s", "times": "1", "share": "1"}


def compare_runs(a: RunRecord, b: RunRecord) -> Comparison:
    """Compare two runs by what they were like at their ends.

    Step times are compared where both have the same total batch, and workers one by one where a rank has the same
    hardware in both. Samples/s are always compared.

    Args:
        a: the first one, against which the other is held.
        b: the second one.

    Example:
        >>> from lightning_hetero.core.report.records import RoundRecord, RunHeader
        >>> header = RunHeader(0.0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> busy = dict.fromkeys(("data", "forward", "backward", "optimizer"), (0.01, 0.01))
        >>> rounds = [RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=t, **busy) for t in (0.1, 0.2)]
        >>> found = compare_runs(*(RunRecord(header, (one,)) for one in rounds))
        >>> found.rate.a, found.rate.b, found.regression, found.exceeds(0.05)
        (80.0, 40.0, 0.5, True)
    """
    first, second = RunFigures(a), RunFigures(b)
    totals = [_total(figures) for figures in (first, second)]
    same_total = totals[0] == totals[1]
    figures = [
        ComparedFigure("rate", "rate", first.rate, second.rate),
        ComparedFigure("step_time", "seconds", first.step_time, second.step_time, same_total),
        ComparedFigure("speed_up", "times", first.speed_up, second.speed_up),
        ComparedFigure("idle", "share", first.idle, second.idle),
        ComparedFigure("share_of_optimum", "share", first.share_of_optimum, second.share_of_optimum),
        ComparedFigure("share_of_solo", "share", share_of_solo(first), share_of_solo(second)),
    ]
    same = _same_ranks(a, b)
    for rank in same[:MOST_WORKERS]:
        rates = [float(each.workers[rank].rate) if rank < len(each.workers) else math.nan for each in (first, second)]
        figures.append(ComparedFigure(f"rate of {worker_name(a, rank)}", "rate", rates[0], rates[1]))
    return Comparison(tuple(figures), tuple(_notes(a, b, totals, same)))


def _total(figures: RunFigures) -> int:
    """Return the samples of a step at the end, those of the start if nothing was timed."""
    one = figures.last[-1] if figures.last else None
    return figures.run.header.total_batch_size if one is None else one.total * one.accumulation


def _same_ranks(a: RunRecord, b: RunRecord) -> list[int]:
    """Return the ranks that have the same hardware in both runs."""
    pairs = enumerate(zip(a.header.workers, b.header.workers, strict=False))
    return [rank for rank, (one, other) in pairs if (one.identity, one.device) == (other.identity, other.device)]


def _notes(a: RunRecord, b: RunRecord, totals: list[int], same: list[int]) -> list[str]:
    notes = []
    if totals[0] != totals[1]:
        notes.append(
            f"The total batches differ ({totals[0]} and {totals[1]} samples a step): samples/s are compared, "
            "step times are not."
        )
    if a.workers != b.workers or len(same) < a.workers:
        alike = f"the {len(same)} ranks with the same hardware" if same else "no single worker"
        notes.append(
            f"The workers differ ({a.workers} and {b.workers} of them): the runs as a whole are compared, and {alike}."
        )
    elif len(same) > MOST_WORKERS:
        notes.append(f"Of the {len(same)} workers, the first {MOST_WORKERS} are compared one by one.")
    for name in ("front_end", "strategy", "policy", "package"):
        values = [plain(getattr(run.header, name), 60) for run in (a, b)]
        if values[0] != values[1]:
            notes.append(f"{name} differs: {values[0]} and {values[1]}.")
    for label, pairs in (
        ("setting", (a.header.settings, b.header.settings)),
        ("version of", (a.header.versions, b.header.versions)),
    ):
        for name in sorted({*pairs[0], *pairs[1]}):
            values = [plain(given.get(name, "none"), 60) for given in pairs]
            if values[0] != values[1]:
                notes.append(f"{label} {plain(name, 60)} differs: {values[0]} and {values[1]}.")
    return notes


WORDS = {
    "rate": "samples/s",
    "step_time": "step time",
    "speed_up": "over an even split",
    "idle": "idle",
    "share_of_optimum": "of the optimum",
    "share_of_solo": "of solo throughput",
}
"""Words for the figures."""


def compared_text(found: Comparison, names: tuple[str, str]) -> str:
    """Return a comparison as lines for a terminal.

    Args:
        found: the comparison.
        names: of both runs.
    """
    rows = []
    for one in found.figures:
        cells = [number(one.name, value, one.kind).text for value in (one.a, one.b)]
        rows.append((WORDS.get(one.name, one.name), *cells, number("", one.ratio, "times").text))
    lines = [f"A: {plain(names[0])}", f"B: {plain(names[1])}", "", *table(rows, ("", "A", "B", "B / A"))]
    lines += ["", *found.notes] if found.notes else []
    change = found.regression
    if math.isfinite(change):
        lines += ["", f"B is {100 * abs(change):.1f} % {'slower' if change > 0 else 'faster'} than A, by samples/s."]
    else:
        lines += ["", "Which of the two is faster is not known: no step was timed in one of them."]
    return "\n".join(lines) + "\n"
