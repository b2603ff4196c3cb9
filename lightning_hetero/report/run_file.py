"""Files of recorded runs: how one is found, read, and freed of what no figure can be taken from."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_hetero.core.report.analysis import PHASES, RunFigures
from lightning_hetero.core.report.json_lines import RecordError
from lightning_hetero.core.report.records import FILE_NAME, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord

__all__ = ["find_record", "read_run", "usable"]

OF_WORKERS = ("sync", "jitter", "max_local")
"""Fields of a round that may be empty, and else have a value for each worker."""


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
        The record, as :func:`usable` leaves it.

    Raises:
        RecordError: if there is none, or it cannot be read.
    """
    file = find_record(path)
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return usable(RunRecord.from_lines(lines))
    except RecordError as error:
        raise RecordError(f"{str(file)!r}: {error}") from None
    except OSError as error:
        raise RecordError(f"{str(file)!r} cannot be read: {error.strerror or error}.") from None


def usable(run: RunRecord) -> RunRecord:
    """Return a record without what no figure can be taken from, such as a damaged line leaves it.

    A round of another number of workers is left out and counts as damaged. A round whose times are not all known and
    positive counts as not timed, and one whose time model gives no split has no model.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> header = RunHeader(0.0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> rounds = RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=0.1), RoundRecord(2.0, 0, 19, 10, 0, (8,))
        >>> found = usable(RunRecord(header, rounds))
        >>> len(found.rounds), found.rounds[0].timed, found.damaged
        (1, 0, 1)
    """
    workers = run.workers or next((len(one.sizes) for one in run.rounds), 0)
    good = [one for one in run.rounds if _is_round(one, workers)]
    rounds = tuple(_with_usable_model(run, _with_usable_times(one)) for one in good)
    changes = tuple(one for one in run.changes if len(one.sizes) == workers)
    left_out = len(run.rounds) - len(rounds) + len(run.changes) - len(changes)
    problems = (*run.problems, *["another number of workers"] * left_out)
    return replace(run, rounds=rounds, changes=changes, problems=problems)


def _is_round(one: RoundRecord, workers: int) -> bool:
    sizes = len(one.sizes) == workers > 0 and one.total > 0 and min(one.sizes) >= 0
    return sizes and one.accumulation >= 1 and one.count >= 0 and math.isfinite(one.time)


def _with_usable_times(one: RoundRecord) -> RoundRecord:
    count = len(one.sizes)
    phases = [getattr(one, name) for name in PHASES]
    known = all(_all_numbers(values, count) and min(values) >= 0 for values in phases)
    timed = one.timed if known and one.timed > 0 and not one.step_time <= 0 else 0
    step_time = one.step_time if timed and math.isfinite(one.step_time) else math.nan
    kept: dict[str, Any] = {name: value if len(value := getattr(one, name)) == count else () for name in OF_WORKERS}
    return replace(one, timed=timed, step_time=step_time, **kept)


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
