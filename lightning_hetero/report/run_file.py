"""Files of recorded runs: how one is found, read, and freed of what no figure can be taken from."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.json_lines import RecordError
from lightning_hetero.core.report.records import FILE_NAME, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord

__all__ = ["find_record", "problems_text", "read_run", "usable"]

log = logging.getLogger("lightning_hetero")

SHORTEST = 1e-9
"""Seconds of the shortest step that is taken for one: a nanosecond, the resolution of clocks."""


def find_record(path: str | Path) -> Path:
    """Return the file that a path names: itself, the record in a folder, or the newest one below the folder.

    Raises:
        RecordError: if there is none.

    Example:
        >>> find_record("no such folder")
        Traceback (most recent call last):
        ...
        lightning_hetero.core.report.json_lines.RecordError: 'no such folder' is no file and no folder. ...
    """
    given = Path(path)
    try:
        if given.is_file():
            return given
        if not given.is_dir():
            raise RecordError(
                f"{str(path)!r} is no file and no folder. Give the folder of a run's logger, such as "
                f"lightning_logs/version_0, or the {FILE_NAME} in it."
            )
        if (given / FILE_NAME).is_file():
            return given / FILE_NAME
        found = [one for one in given.rglob(FILE_NAME) if one.is_file()]
        if found:
            return max(found, key=lambda one: (one.stat().st_mtime_ns, str(one)))
    except (OSError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    raise RecordError(
        f"there is no {FILE_NAME} in {str(path)!r} or below it. A run writes it into the folder of its logger; "
        "report=False turns it off."
    )


def read_run(path: str | Path) -> RunRecord:
    """Read the record of a run.

    Args:
        path: the file, or a folder as for :func:`find_record`.

    Returns:
        The record, as :func:`usable` leaves it. Lines that cannot be read are left out, with a warning that names them.

    Raises:
        RecordError: if there is none, or it cannot be read.
    """
    file = find_record(path)
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            run = RunRecord.from_lines(lines)
    except RecordError as error:
        raise RecordError(f"{str(file)!r}: {error}") from None
    except OSError as error:
        raise RecordError(f"{str(file)!r} cannot be read: {error.strerror or error}.") from None
    if run.problems:
        log.warning("%s: what cannot be read is left out. %s", file, problems_text(run))
    return usable(run)


def problems_text(run: RunRecord, most: int = 3) -> str:
    """Return the first lines that could not be read, with what is wrong with them.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> problems_text(RunRecord(header, problems=("line 7: a.", "line 8: b.", "line 9: c.")), most=1)
        'line 7: a. 2 more lines cannot be read.'
    """
    more = run.damaged - most
    rest = f"{more} more line{'s' * (more > 1)} cannot be read." if more > 0 else ""
    return " ".join([*run.problems[:most], rest]).strip()


def usable(run: RunRecord) -> RunRecord:
    """Return a record without what no figure can be taken from.

    A round whose times are not all known and positive counts as not timed, and one whose time model gives no split has
    no model.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> usable(RunRecord(header, (RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=0.1),))).rounds[0].timed
        0
    """
    return replace(run, rounds=tuple(_with_usable_model(run, _with_usable_times(one)) for one in run.rounds))


def _with_usable_times(one: RoundRecord) -> RoundRecord:
    known = all(_all_numbers(getattr(one, name), len(one.sizes)) for name in PHASES)
    timed = one.timed if known and one.step_time >= SHORTEST else 0
    return replace(one, timed=timed, step_time=one.step_time if timed else math.nan)


def _all_numbers(values: Sequence[float], count: int) -> bool:
    return len(values) == count and all(math.isfinite(value) for value in values)


def _with_usable_model(run: RunRecord, one: RoundRecord) -> RoundRecord:
    nodes = len(one.nodes) == len(one.sizes) and all(_all_numbers(node, 4) for node in one.nodes)
    if nodes and _all_numbers((one.gamma, one.t_o, one.t_u), 3):
        try:
            RunFigures(replace(run, rounds=(replace(one, timed=1, step_time=1.0),))).optimum  # noqa: B018
            return one
        except ValueError:
            pass
    return replace(one, nodes=())
