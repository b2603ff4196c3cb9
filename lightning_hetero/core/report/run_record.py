"""Record of one run, read from its lines."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_hetero.core.report.json_lines import RecordError, from_line
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
        damaged: lines that could not be read.

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
    damaged: int = 0

    @classmethod
    def of(cls, records: Iterable[Record], damaged: int = 0) -> "RunRecord":
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
            damaged,
        )

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> "RunRecord":
        """Read lines; damaged ones, such as one that was cut when a disk was full, are counted and left out.

        Raises:
            RecordError: if no header can be read, or its schema is a newer one.
        """
        records: list[Record] = []
        damaged = 0
        for line in lines:
            if not line.strip():
                continue
            try:
                record = from_line(line)
            except RecordError:
                if not records:
                    raise
                damaged += 1
                continue
            if record is not None:
                records.append(record)
        return cls.of(records, damaged)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.header.workers)
