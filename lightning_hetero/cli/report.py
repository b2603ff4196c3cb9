"""``lightning-hetero report``: the page, the picture and the trace of a recorded run."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_hetero.cli._parser import Parser, UserError
from lightning_hetero.core.report.json_lines import RecordError
from lightning_hetero.core.report.records import FILE_NAME
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.whole_file import write_file
from lightning_hetero.report.page import write_picture, write_report
from lightning_hetero.report.run_file import find_record, read_run
from lightning_hetero.report.trace import trace_events

__all__ = ["add_options", "run"]


def add_options(parser: Parser) -> None:
    """Add the options of ``report``."""
    add = parser.add_argument
    where = f"folder of a run's logger, or the {FILE_NAME} in it; of a folder above, the newest one below"
    add("record", metavar="RUN", help=where)
    add("-o", "--output", metavar="FILE", help="HTML file to write (default report.html beside the record)")
    add("--png", metavar="FILE", help="write the main figure, too")
    add("--trace", metavar="FILE", help="write sampled steps as a trace for Perfetto, too")


def run(options: argparse.Namespace) -> int:
    """Write the report of a run, and what else was asked for."""
    try:
        record = find_record(options.record)
        recorded = read_run(record)
    except RecordError as error:
        raise UserError(str(error)) from error
    output = Path(options.output) if options.output else record.with_name("report.html")
    wanted: list[tuple[str, Path, Callable[[RunRecord, Path], None]]] = [("page", output, write_report)]
    if options.png:
        wanted.append(("picture", Path(options.png), write_picture))
    if options.trace:
        wanted.append(("trace", Path(options.trace), _write_trace))
    for what, path, write in wanted:
        if path.resolve() == record.resolve():
            raise UserError(f"{path} is the record itself. Give another file to write.")
        try:
            write(recorded, path)
        except OSError as error:
            why = error.strerror or "it cannot be written"
            raise UserError(f"{path}: {why}. Give a file that can be written.") from error
        sys.stdout.write(f"{what}: {path}{_hint(what, recorded)}\n")
    return 0


def _write_trace(run: RunRecord, path: Path) -> None:
    write_file(path, json.dumps(trace_events(run), allow_nan=False).encode())


def _hint(what: str, run: RunRecord) -> str:
    if what != "trace":
        return ""
    if any(one.sample for one in run.rounds):
        return " (open it in https://ui.perfetto.dev)"
    return " (it has no steps, as the record has no sample of them)"
