"""Parts of a report's page: what each shows, and why it is empty where it is."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.what_if import what_if
from lightning_hetero.report.events import change_table, kept_table, pair_table, run_table, straggler_table
from lightning_hetero.report.figures import Panel, bars, panels_of
from lightning_hetero.report.series import model_error, round_series, share_of_solo
from lightning_hetero.report.tables import Table, best_change, hardware_table, what_if_table, worker_table
from lightning_hetero.report.values import Value, number, plain

__all__ = ["Section", "sections_of", "tiles_of"]


@dataclass(frozen=True)
class Section:
    """Part of a page.

    Args:
        name: its anchor.
        title: its heading.
        lead: what it shows, in a line or two.
        values: numbers under the heading.
        panels: figure.
        over_steps: whether the figure's axis is that of steps.
        tables: tables with their captions.
        empty: why there is nothing, shown in place of all else.
    """

    name: str
    title: str
    lead: str = ""
    values: tuple[tuple[str, Value], ...] = ()
    panels: Sequence[Panel] = ()
    over_steps: bool = True
    tables: tuple[tuple[str, Table], ...] = ()
    empty: str = ""


def tiles_of(figures: RunFigures) -> list[tuple[str, Value, str]]:
    """Return the main numbers that are known: what each is, its value, and what to know about it."""
    tiles = [
        (f"speed over {figures.baseline}", number("speed_up", figures.speed_up, "times"), "at the end of the run"),
        ("in the whole run", number("speed_up_of_run", figures.speed_up_of_run, "times"), "steps before changes, too"),
        ("throughput", number("rate", figures.rate, "rate"), "samples/s of all workers"),
        ("step time", number("step_time", figures.step_time, "seconds"), "measured at the end"),
        ("at the start", number("step_time_before", figures.step_time_before, "seconds"), f"with {figures.baseline}"),
        ("idle", number("idle", figures.idle, "share"), "of all workers' time"),
        ("of the optimum", number("share_of_optimum", figures.share_of_optimum, "share"), "best split, same workers"),
        ("of solo throughput", number("share_of_solo", share_of_solo(figures), "share"), "sum of all workers alone"),
    ]  # fmt: skip
    alone = ("rate", "step_time", "idle")
    known = [tile for tile in tiles if math.isfinite(tile[1].value)]
    return [tile for tile in known if len(figures.workers) > 1 or tile[1].key in alone]


def sections_of(run: RunRecord, figures: RunFigures) -> list[Section]:
    """Return the parts of the page, in their order; those that make no sense for this run are left out."""
    series = round_series(run)
    panels = panels_of(run, series)
    untimed = "" if figures.last else "No sync round has measured a step yet."
    many = max(run.workers, len(figures.workers)) > 1
    found = [
        Section(
            "workers",
            "Workers",
            "Time of one step by what each worker does in it, over the last rounds with the final split. "
            "A worker that waits longer than the others could take more samples.",
            panels=() if untimed else [bars(run, figures)],
            over_steps=False,
            tables=(("", worker_table(figures)),),
            empty=untimed,
        ),
        _timeline(run, panels.get("timeline", [])),
        Section(
            "steps",
            "Predicted against measured",
            "Each step was predicted before it ran, by the time model of the round before. The band is its standard "
            "error.",
            values=_known(("mean difference", number("model_error", model_error(run), "share")),
                          ("predicted at the end", number("predicted", figures.predicted, "seconds")),
                          (f"{figures.baseline} would take", number("even", figures.even, "seconds"))),
            panels=panels.get("steps", []),
            empty="" if "steps" in panels else "No step was measured from end to end.",
        ),
        Section(
            "shares",
            "How much of the hardware is used",
            "The optimum is the shortest step that any split of the same total has on these workers. The summed solo "
            "throughput is what all workers would train without waiting for each other.",
            panels=panels.get("shares", []),
            empty="" if "shares" in panels else "There is no time model yet, and no measured step.",
        ),
    ]  # fmt: skip
    if "noise" in panels:
        lead = "The larger the gradient noise scale, the larger the batch that is worth its samples."
        found.append(Section("noise", "Noise scale and goodput", lead, panels=panels["noise"]))
    if many:
        found += [_stragglers(run, figures), _what_if(run, figures)]
    found.append(
        Section(
            "hardware",
            "Hardware",
            tables=(("", hardware_table(run)),),
            empty="" if run.header.workers else "The record names no workers.",
        )
    )
    return [*found, _about(run)]


def _known(*values: tuple[str, Value]) -> tuple[tuple[str, Value], ...]:
    """Return the numbers that are known."""
    return tuple(one for one in values if math.isfinite(one[1].value))


def _timeline(run: RunRecord, panels: Sequence[Panel]) -> Section:
    changes, kept = change_table(run), kept_table(run)
    tables = (("Changes", changes), ("Why the split stayed", kept))
    return Section(
        "timeline",
        "Split over the steps",
        "Each triangle is a change of the plan; its reason is under the pointer and in the list below. "
        "Red stretches are stragglers."
        if run.changes or run.stragglers
        else "The plan did not change.",
        values=_sending(run),
        panels=panels,
        tables=tuple((caption, table) for caption, table in tables if table.rows),
        empty="" if panels else "The run has held no sync round yet.",
    )


def _sending(run: RunRecord) -> tuple[tuple[str, Value], ...]:
    """Return how much of the gradient a worker sends at the end, as far as that is known."""
    if not run.rounds:
        return ()
    last = run.rounds[-1]
    density, sent = number("density", last.density, "share"), number("sent_bytes", last.sent_bytes, "bytes")
    label = "sent of the gradient, one step late" if last.stale else "sent of the gradient"
    return _known((label, density), ("sent by a worker in a step", sent))


def _stragglers(run: RunRecord, figures: RunFigures) -> Section:
    if not run.stragglers:
        return Section("stragglers", "Stragglers", empty="None was found: no worker made all others wait for long.")
    return Section(
        "stragglers",
        "Stragglers",
        "A straggler is a worker, or the link, that makes all others wait.",
        values=(("others waited", number("lost", figures.lost, "seconds")),),
        tables=(("", straggler_table(run)),),
    )


def _what_if(run: RunRecord, figures: RunFigures) -> Section:
    title, found = "What if", what_if(figures)
    if not found:
        return Section(
            "what-if", title, empty="There is no time model of the workers yet, so nothing can be predicted."
        )
    lead = "Predictions of the time model for the same total batch, against the best split of the workers as they are."
    share = number("link_share", figures.link_share, "share")
    values = _known(("waiting for the link", share))
    return Section(
        "what-if", title, f"{lead} {best_change(run, found)}".strip(), values, tables=(("", what_if_table(run, found)),)
    )


def _about(run: RunRecord) -> Section:
    header = run.header
    command = Table(("command",), ((plain(shlex.join(header.command), 4000),),)) if header.command else None
    tables = [
        ("", run_table(run)),
        *([("Command", command)] if command else []),
        ("Settings", pair_table(header.settings, ("setting", "value"))),
        ("Versions", pair_table(header.versions, ("package", "version"))),
    ]
    return Section("run", "The run", tables=tuple((caption, table) for caption, table in tables if table.rows))
