"""Record of one run, read from its lines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.report.json_lines import RecordError, begins_run, from_line
from lightning_hetero.core.report.records import (
    ChangeRecord,
    EndRecord,
    GainRecord,
    Record,
    RoundRecord,
    RunHeader,
    StragglerRecord,
)

__all__ = ["RunRecord"]


@checked_keywords
@dataclass(frozen=True)
class RunRecord:
    """Record of one run.

    Args:
        header: what ran, and where.
        rounds: sync rounds, in their order.
        changes: plans that were adopted.
        gains: measured gains of these changes.
        stragglers: begins and ends of stragglers.
        end: how the run ended, ``None`` if it was killed or still runs.
        problems: lines that could not be read, each with its number and what is wrong with it.

    Example:
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> RunRecord.of([header, RoundRecord(1.0, 0, 9, 10, 8, (6, 2))]).rounds[0].total
        8
    """

    header: RunHeader
    rounds: tuple[RoundRecord, ...] = ()
    changes: tuple[ChangeRecord, ...] = ()
    gains: tuple[GainRecord, ...] = ()
    stragglers: tuple[StragglerRecord, ...] = ()
    end: EndRecord | None = None
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Iterable[Record], problems: Sequence[str] = ()) -> "RunRecord":
        """Sort records by kind; of several runs in one file, the last one counts.

        Raises:
            RecordError: if none of them is a header.
        """
        every = list(records)
        headers = [(one, every[i + 1 :]) for i, one in enumerate(every) if isinstance(one, RunHeader)]
        if not headers:
            raise RecordError("the record has no first line of kind 'run'; give the file that a training wrote.")
        header, rest = headers[-1]
        ends = [one for one in rest if isinstance(one, EndRecord)]
        return cls(
            header,
            tuple(one for one in rest if isinstance(one, RoundRecord)),
            tuple(one for one in rest if isinstance(one, ChangeRecord)),
            tuple(one for one in rest if isinstance(one, GainRecord)),
            tuple(one for one in rest if isinstance(one, StragglerRecord)),
            ends[-1] if ends else None,
            tuple(problems),
        )

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> "RunRecord":
        """Read the last run in some lines; damaged ones, such as one cut by a full disk, are noted and left out.

        A run begins with its header, whether that can be read or not: what follows a damaged header belongs to no other
        run.

        Raises:
            RecordError: if the header of the last run cannot be read, or its schema is a newer one.
        """
        newest: list[tuple[int, str]] = []
        runs = 0
        for number, line in enumerate(lines, 1):
            if begins_run(line):
                runs, newest = runs + 1, []
            if line.strip() and (runs or not newest):  # of a file without a run, the first line says what it is
                newest.append((number, line))
        records: list[Record] = []
        problems: list[str] = []
        workers = 0
        for number, line in newest:
            try:
                record = from_line(line, workers)
            except RecordError as error:
                if not records:
                    cure = f" Without the lines from {number} on, the run before can be read." if runs > 1 else ""
                    of = ", the first of the newest run" if runs else ""
                    raise RecordError(f"line {number}{of}: {error}{cure}") from None
                problems.append(f"line {number}: {error}")
                continue
            if record is not None:
                records.append(record)
                workers = workers or _workers_of(record)
        return cls.of(records, problems)

    @property
    def damaged(self) -> int:
        """Number of lines that could not be read."""
        return len(self.problems)

    @property
    def unseen(self) -> int:
        """Steps after the last sync round, of which nothing is recorded."""
        return 0 if self.end is None else max(self.end.steps - sum(one.count for one in self.rounds), 0)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.header.workers)


def _workers_of(record: Record) -> int:
    """Return the number of workers that a record tells, 0 if it tells none."""
    if isinstance(record, RunHeader):
        return len(record.workers)
    return len(record.sizes) if isinstance(record, RoundRecord) else 0
