"""Figures of a report, drawn by Matplotlib onto given axes; colors are the names of :data:`COLORS`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.lost_time import straggler_spans
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.report.series import RoundSeries, StepAxis, shown_workers
from lightning_hetero.report.tables import ranks_text

__all__ = ["COLORS", "Panel", "RANKS", "RANKS_DARK", "bars", "new_figure", "panels_of"]

Array = npt.NDArray[np.float64]

COLORS = {
    "ink": ("#222227", "#e6e6ea"),
    "muted": ("#6b7281", "#9aa1ad"),
    "grid": ("#e3e5ea", "#33363e"),
    "paper": ("#fffffe", "#17181c"),
    "data": ("#cc79a8", "#d98fb9"),
    "forward": ("#0072b3", "#3d9be0"),
    "backward": ("#56b4ea", "#8fd0f7"),
    "optimizer": ("#009e74", "#2fbf95"),
    "waiting": ("#d5d8de", "#464a54"),
    "measured": ("#0b6fb4", "#5ab1f0"),
    "predicted": ("#d55e01", "#ff9950"),
    "even": ("#8a8f99", "#7d838f"),
    "optimum": ("#009e75", "#35c79b"),
    "solo": ("#8c5bb5", "#b48be0"),
    "change": ("#a3690b", "#e0a640"),
    "straggler": ("#c0392c", "#ff8577"),
}
"""Color of each part, on white and on black paper; those of the light ones are all different."""
RANKS = ("#1f77b5", "#ff7f0f", "#2ca02d", "#d62729", "#9467be", "#8c564c", "#e377c3", "#17bed0")
RANKS_DARK = ("#62aee8", "#ffa552", "#62c963", "#f2706f", "#bb98e0", "#c39084", "#f0a3da", "#5fdce8")
"""Colors of workers, by rank; further ones repeat them with other lines."""
LINES = ("-", "--", ":", "-.")
WAYS = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2, "columnspacing": 1.2}
NARROW = 6.0
"""Inches up to which a figure is for the screen of a phone."""
MOST_LINES = 12
"""Lines of different sizes in a figure."""
MOST_MARKS = 60
"""Changes and stragglers that are marked in a figure."""


class Panel:
    """One part of a figure.

    Args:
        draw: draws it onto axes.
        height: relative height.
    """

    def __init__(self, draw: Callable[[Any], None], height: float = 1.0) -> None:
        self.draw, self.height = draw, height


def color(name: str) -> str:
    """Return a color on white paper."""
    return COLORS[name][0]


def new_figure(width: float, heights: Sequence[float], *, shared: bool = True) -> tuple[Any, list[Any]]:
    """Return a figure with one panel for each height, in inches, below each other."""
    figure = Figure(figsize=(width, sum(heights)), layout="constrained", facecolor="none")
    axes = figure.subplots(len(heights), sharex=shared, squeeze=False, height_ratios=list(heights))[:, 0]
    for one in axes:
        _plain_axes(one)
    return figure, list(axes)


def _plain_axes(axes: Any) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(color("muted"))
    axes.tick_params(colors=color("ink"), labelsize=8, length=2.5, color=color("muted"))
    axes.grid(axis="y", color=color("grid"), linewidth=0.7)
    axes.set_axisbelow(True)


def _named(axes: Any, ylabel: str, *, always: bool = False) -> None:
    """Name what a panel shows, above it, and its lines beside that."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or (always and handles):
        columns = 5 if axes.figure.get_figwidth() > NARROW else 3
        legend = axes.legend(handles, labels, fontsize=8, frameon=False, ncols=columns, labelcolor=color("ink"), **WAYS)
        legend.set_in_layout(True)
    axes.set_ylabel(ylabel, fontsize=8, color=color("ink"))


def bars(run: RunRecord, figures: RunFigures) -> Panel:
    """Return the panel of each worker's phases in a step, waiting at the end."""
    shown = [figures.workers[rank] for rank in shown_workers(figures)] if figures.workers else []

    def draw(axes: Any) -> None:
        places, left = np.arange(len(shown)), np.zeros(len(shown))
        parts = {name: np.array([one.phases[name] for one in shown]) for name in PHASES}
        parts["waiting"] = np.array([one.waiting for one in shown])
        for name, seconds in parts.items():
            axes.barh(places, 1e3 * seconds, left=left, height=0.68, color=color(name), label=name)
            left = left + 1e3 * seconds
        axes.set_yticks(places, [f"rank {one.rank}" for one in shown])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=color("grid"), linewidth=0.7)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("ms in a step, at the end of the run", fontsize=8, color=color("ink"))
        _named(axes, "")

    return Panel(draw, 0.7 + 0.24 * max(len(shown), 1))


def panels_of(run: RunRecord, series: RoundSeries) -> dict[str, list[Panel]]:
    """Return the panels over steps by the section that shows them; those without data are left out."""
    if not len(series.steps):
        return {}
    found = {
        "timeline": [
            Panel(lambda axes: _split(axes, run, series), 2.1 + 0.05 * min(series.sizes.shape[1], MOST_LINES)),
            *_optional(series, "total", "samples of a step", len(set(series.total.tolist())) > 1),
            *_optional(series, "density", "density"),
            *_optional(series, "link", "link (ms)", series.sizes.shape[1] > 1, factor=1e3),
        ],
        "steps": [Panel(lambda axes: _step_times(axes, series, RunFigures(run).baseline), 2.2)]
        if _any(series.step_time)
        else [],
        "shares": [Panel(lambda axes: _shares(axes, series), 1.9)]
        if _any(series.share_of_optimum) or _any(series.share_of_solo)
        else [],
        "noise": [*_optional(series, "noise_scale", "noise scale"), *_optional(series, "goodput", "goodput")],
    }
    return {name: panels for name, panels in found.items() if panels}


def _any(values: Array) -> bool:
    return bool(np.isfinite(values).any())


def _optional(series: RoundSeries, name: str, label: str, wanted: bool = True, factor: float = 1.0) -> list[Panel]:
    """Return a panel of one line, none without values."""
    values = factor * getattr(series, name)

    def draw(axes: Any) -> None:
        _over_steps(axes, series, values, color=color("measured"))
        _from_zero(axes)
        _named(axes, label)

    return [Panel(draw, 1.1)] if wanted and _any(values) else []


def _from_zero(axes: Any) -> None:
    """Let the upward axis begin at zero, with some room above the highest line."""
    highest = axes.dataLim.y1
    axes.set_ylim(0, 1.08 * highest if math.isfinite(highest) and highest > 0 else 1.0)


def _over_steps(axes: Any, series: RoundSeries, values: Array, **style: Any) -> None:
    """Draw values that hold for the steps before each round; a single one is a point, too."""
    known = np.isfinite(values)
    marker = "o" if known.sum() <= 1 else None
    x = np.concatenate([[0.0], series.steps])
    y = np.concatenate([values[:1], values])
    axes.plot(x, y, drawstyle="steps-pre", marker=marker, markersize=3, **{"linewidth": 1.4, **style})
    _all_steps(axes, series)


def _all_steps(axes: Any, series: RoundSeries) -> None:
    """Let all figures over steps have one axis."""
    axes.set_xlim(-0.01 * series.last, 1.01 * series.last if series.last > 0 else 1.0)


def _split(axes: Any, run: RunRecord, series: RoundSeries) -> None:
    lines, hidden = alike(series)
    if hidden:
        others = np.concatenate([series.sizes, series.sizes[-1:]])[:, hidden]
        shade = {"color": color("grid"), "linewidth": 0, "label": f"{len(hidden)} others"}
        axes.fill_between(_since(series), others.min(axis=1), others.max(axis=1), step="post", **shade)
    for i, ranks in enumerate(lines):
        style = {"color": RANKS[i % len(RANKS)], "linestyle": LINES[i // len(RANKS) % len(LINES)]}
        sizes = np.append(series.sizes[:, ranks[0]], series.sizes[-1, ranks[0]])
        axes.plot(_since(series), sizes, drawstyle="steps-post", linewidth=1.4, label=_ranks_label(ranks), **style)
    _from_zero(axes)
    _all_steps(axes, series)
    top, axis = axes.get_ylim()[1], StepAxis(run)
    for i, one in enumerate(run.changes[-MOST_MARKS:], max(len(run.changes) - MOST_MARKS, 0)):
        x = axis.at(one.epoch, one.step)
        axes.axvline(x, color=color("change"), linewidth=0.8, linestyle=(0, (2, 2)), gid=f"change-{i}-line")
        axes.plot([x], [top], "v", color=color("change"), markersize=6, clip_on=False, gid=f"change-{i}")
    _straggler_spans(axes, run, float(series.steps[-1]))
    axes.set_ylim(0, top)
    _named(axes, "samples of each worker", always=True)


def alike(series: RoundSeries, most: int = MOST_LINES) -> tuple[list[list[int]], list[int]]:
    """Return the ranks of each line of sizes, equal lines together, and the ranks that have no line.

    Of many lines, some are shown, from the largest sizes at the end to the smallest.
    """
    _, kind = np.unique(series.sizes, axis=1, return_inverse=True)
    groups: dict[int, list[int]] = {}
    for rank, one in enumerate(np.ravel(kind).tolist()):
        groups.setdefault(one, []).append(rank)
    lines = list(groups.values())
    if len(lines) > most:
        order = sorted(lines, key=lambda ranks: (-series.sizes[-1, ranks[0]], ranks[0]))
        lines = [order[round(i)] for i in np.linspace(0, len(order) - 1, most)]
    shown = {rank for ranks in lines for rank in ranks}
    return sorted(lines), [rank for rank in range(series.sizes.shape[1]) if rank not in shown]


def _ranks_label(ranks: Sequence[int]) -> str:
    text = ranks_text(ranks)
    if len(text) > 16:
        return f"{len(ranks)} workers like rank {ranks[0]}"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _since(series: RoundSeries) -> Array:
    """Return where each split begins, and where the last one ends."""
    return np.append(series.starts, series.steps[-1])


def _straggler_spans(axes: Any, run: RunRecord, last: float) -> None:
    every, axis = straggler_spans(run), StepAxis(run)
    for i, one in enumerate(every[-MOST_MARKS:], max(len(every) - MOST_MARKS, 0)):
        low = axis.at(one.begin.epoch, one.begin.step) if one.begin else 0.0
        high = axis.at(one.end.epoch, one.end.step) if one.end else last
        axes.axvspan(low, max(high, low), color=color("straggler"), alpha=0.16, linewidth=0, gid=f"straggler-{i}")


def _step_times(axes: Any, series: RoundSeries, baseline: str) -> None:
    ms = 1e3
    if _any(series.even):
        _over_steps(axes, series, ms * series.even, color=color("even"), linestyle="--", label=f"{baseline} (model)")
    known = np.isfinite(series.predicted) & np.isfinite(series.error)
    if known.any():
        low, high = ms * (series.predicted - series.error), ms * (series.predicted + series.error)
        axes.fill_between(
            series.steps, low, high, where=known, step="pre", color=color("predicted"), alpha=0.2, linewidth=0
        )
    _over_steps(axes, series, ms * series.step_time, color=color("measured"), linewidth=2.4, label="measured")
    if _any(series.predicted):
        style = {"color": color("predicted"), "linewidth": 1.2, "linestyle": (0, (4, 2))}
        _over_steps(axes, series, ms * series.predicted, label="predicted", **style)
    _from_zero(axes)
    _named(axes, "ms of a step")


def _shares(axes: Any, series: RoundSeries) -> None:
    for name, label, shade in (
        ("share_of_optimum", "of the optimum", "optimum"),
        ("share_of_solo", "of summed solo throughput", "solo"),
    ):
        values = 100.0 * getattr(series, name)
        if _any(values):
            _over_steps(axes, series, values, color=color(shade), label=label)
    _from_zero(axes)
    _named(axes, "%")
