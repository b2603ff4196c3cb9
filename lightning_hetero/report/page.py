"""Page of a run: one HTML file that needs no network, and the main figure as a picture."""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lightning_hetero import __version__
from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.lost_time import straggler_spans
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.whole_file import write_file
from lightning_hetero.report.figures import Panel, bars, panels_of
from lightning_hetero.report.run_file import problems_text
from lightning_hetero.report.sections import Section, sections_of, tiles_of
from lightning_hetero.report.series import round_series
from lightning_hetero.report.svg import color_rules, drawn, picture_bytes
from lightning_hetero.report.tables import sizes_text, worker_name
from lightning_hetero.report.values import Value, plain, verdict

__all__ = ["page_of", "write_picture", "write_report"]

WIDTHS = {"wide": 9.6, "narrow": 4.4}
"""Inches of each figure, for screens of either kind."""


def write_report(run: RunRecord, path: str | Path) -> None:
    """Write the page of a run.

    Args:
        run: its record, as :func:`~lightning_hetero.report.run_file.read_run` returns it.
        path: HTML file to write; an existing one is replaced at once.

    Raises:
        OSError: if it cannot be written.
    """
    write_file(path, page_of(run).encode("utf-8", "replace"))


def write_picture(run: RunRecord, path: str | Path) -> None:
    """Write the main figure of a run as PNG: sizes and step times over the steps, and the phases of each worker.

    Raises:
        OSError: if it cannot be written.
    """
    figures = RunFigures(run)
    panels = panels_of(run, round_series(run))
    over_steps = [*panels.get("timeline", [])[:1], *panels.get("steps", [])]
    below = [bars(run, figures)] if figures.workers else []
    write_file(path, picture_bytes(over_steps or [Panel(_nothing)], below, verdict(figures)))


def _nothing(axes: object) -> None:
    """Draw nothing: no step was timed."""


def page_of(run: RunRecord) -> str:
    """Return the page of a run as HTML.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> page = page_of(RunRecord(RunHeader(0.0, "0.2.0", "Trainer", "hetero_ddp", "pid", (), 8, command=("<b>",))))
        >>> "No step was timed" in page, "<b>" in page
        (True, False)
    """
    figures = RunFigures(run)
    sections = sections_of(run, figures)
    titles = _titles(run)
    pictures = {one.name: _pictures(one, titles) for one in sections}
    folder = files("lightning_hetero.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "theme.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    style = style.replace("/*light*/", color_rules(dark=False)).replace("/*dark*/", color_rules(dark=True))
    return template.render(
        verdict=verdict(figures),
        title=_title(run),
        tiles=tiles_of(figures),
        warning=_warning(run),
        sections=sections,
        pictures=pictures,
        is_value=lambda cell: isinstance(cell, Value),
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )


def _pictures(one: Section, titles: Mapping[str, str]) -> dict[str, Markup]:
    """Return the figure of a section for each kind of screen."""
    if not one.panels:
        return {}
    return {
        kind: drawn(one.panels, width, f"{one.name}-{kind}", one.title, titles, steps=one.over_steps)
        for kind, width in WIDTHS.items()
    }


def _title(run: RunRecord) -> str:
    script = next((one for one in run.header.command if one.endswith(".py")), "")
    return " · ".join(part for part in (plain(Path(script).name, 60), plain(run.header.hostname, 60)) if part) or "run"


def _warning(run: RunRecord) -> str:
    parts = []
    if run.end is None:
        parts.append("No end is recorded: the run was killed, or it still runs. All below is up to the last round.")
    elif run.end.status != "finished":
        parts.append(f"The run ended with an error: {plain(run.end.status)}.")
    if run.damaged:
        left_out = f"Parts of the record could not be read and are left out (lines: {run.damaged})."
        parts.append(f"{left_out} {plain(problems_text(run), 600)}")
    return " ".join(parts)


def _titles(run: RunRecord) -> dict[str, str]:
    """Return what the marks of changes and stragglers say under the pointer."""
    found = {}
    for i, one in enumerate(run.changes):
        sizes = sizes_text(one.sizes, run.header.by_cost)
        found[f"change-{i}"] = f"epoch {one.epoch}, step {one.step}: {sizes}. {plain(one.reason)}"
    for i, each in enumerate(straggler_spans(run)):
        found[f"straggler-{i}"] = f"straggler: {worker_name(run, each.known.rank)}, {plain(each.known.phase)}"
    return found
