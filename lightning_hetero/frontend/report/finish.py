"""Summary of a run that ends: logged on rank 0, with the verdict first."""

import io
import logging
import shutil
import sys
from typing import Any

from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.summary import Summary, summary_of
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.report.folder import NO_FOLDER

__all__ = ["finish_report", "status_of"]

log = logging.getLogger("lightning_hetero")

LOST = ("closed by peer", "reset by peer", "broken pipe", "remote process exited")
"""Parts of what gloo and NCCL say, in lower case, where the process of another rank is gone."""


def finish_report(engine: HeteroEngine, error: BaseException | None = None) -> RunRecord | None:
    """End the record of a run, and log its summary on rank 0; a further call does nothing.

    Args:
        engine: engine of the run.
        error: what ended the run, ``None`` if it ended by itself.

    Returns:
        The record, ``None`` where there is none.
    """
    try:
        return _finish(engine, error)
    except Exception:  # on rank 0 alone: the others would wait for it in what ends a training
        log.exception("the summary of the run could not be made; training itself is not affected. Please report this.")
        return None


def _finish(engine: HeteroEngine, error: BaseException | None) -> RunRecord | None:
    watch = engine.rounds.watch
    path, homeless = watch.path, watch.recorder is not None and watch.recorder.folder is None
    run = watch.finish(status_of(error), engine.position, engine.observer.synced_steps)
    if run is None or not run.rounds:
        return run
    summary = summary_of(run)
    where = "" if path is None else f"\nrecord: {path} (lightning-hetero report {path.parent})"
    if homeless:
        how = NO_FOLDER.get(run.header.front_end, "report='folder'")
        where = f"\nno record was written, because the run has no folder: give {how}"
    log.info("%s%s", _rendered(summary), where)
    return run


def status_of(error: BaseException | None) -> str:
    r"""Return how a run has ended, as its record says it.

    Where another rank fails, rank 0, which keeps the record, only sees its connection to that rank break.

    Example:
        >>> status_of(None), status_of(KeyboardInterrupt()), status_of(ValueError("too large\nand more"))
        ('finished', 'KeyboardInterrupt', 'ValueError: too large')
        >>> status_of(RuntimeError("Connection closed by peer [10.0.0.2]:4711"))[:63]
        'rank 0 lost its connection to another rank, whose log may say w'
    """
    if error is None:
        return "finished"
    name, text = type(error).__name__, str(error).strip()
    first = text.partition("\n")[0][:200]
    status = f"{name}: {first}" if text else name
    if isinstance(error, RuntimeError) and any(sign in text.lower() for sign in LOST):
        return f"rank 0 lost its connection to another rank, whose log may say why ({status})"
    return status


def _rendered(summary: Summary) -> str:
    """Return the summary as text, with rich's table where rich is installed and shows one."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return summary.text()
    if not summary.rows or not sys.stderr.isatty():
        return summary.text()
    table = Table(*[_column(name) for name in summary.columns], title=summary.verdict, title_justify="left")
    for row in summary.rows:
        table.add_row(*row)
    drawn = io.StringIO()
    Console(file=drawn, width=min(shutil.get_terminal_size().columns, 120)).print(table)
    return "\n".join(["", drawn.getvalue().rstrip(), *summary.lines])


def _column(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="left" if name == "device" else "right")
