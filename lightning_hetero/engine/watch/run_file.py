"""File of a run's record: lines are appended, its size is bounded, and a disk that fails ends the file, not the run."""

import logging
import os
from pathlib import Path

from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.records import FILE_NAME, EndRecord, Record, RoundRecord, RunHeader
from lightning_hetero.core.report.run_record import RunRecord

__all__ = ["RunFile"]

log = logging.getLogger("lightning_hetero")


class RunFile:
    """Records of one run, in memory and, once a folder is known, in a file.

    When the lines exceed their budget, every other sync round is dropped, the first and the last excepted. Changes,
    gains and stragglers stay until they alone exceed it.

    Args:
        max_bytes: budget of the lines.

    Attributes:
        path: the file, ``None`` before :meth:`open` and after an error.
        dropped: sync rounds that were dropped.
    """

    def __init__(self, max_bytes: int = 4_000_000) -> None:
        self.max_bytes = max_bytes
        self.path: Path | None = None
        self.dropped = 0
        self._records: list[Record] = []
        self._sizes: list[int] = []
        self._before = 0  # bytes of earlier runs in the same file

    @property
    def run(self) -> RunRecord:
        """The run so far."""
        return RunRecord.of(self._records)

    @property
    def has_header(self) -> bool:
        """``True`` once the run was described."""
        return bool(self._records)

    def open(self, folder: Path) -> None:
        """Write all lines so far to the file of a folder, after those of earlier runs, and later ones as they come."""
        if self.path is not None or not self._records:
            return
        self.path = folder / FILE_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._before = _end_line(self.path) if self.path.exists() else 0
        except OSError as error:
            self._give_up(error)
            return
        self._append("".join(as_line(one) for one in self._records))

    def write(self, record: Record) -> None:
        """Add a record."""
        line = as_line(record)
        self._records.append(record)
        self._sizes.append(len(line))
        if sum(self._sizes) > self.max_bytes and not isinstance(record, EndRecord):
            self._thin()
        else:
            self._append(line)

    def _append(self, text: str) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._give_up(error)

    def _thin(self) -> None:
        """Drop every other round, and of all else the older half if that is not enough; rewrite the file."""
        rounds = [i for i, one in enumerate(self._records) if isinstance(one, RoundRecord)]
        drop = set(rounds[1:-1:2])
        if sum(size for i, size in enumerate(self._sizes) if i not in drop) > 0.75 * self.max_bytes:
            rest = [i for i, one in enumerate(self._records) if not isinstance(one, RoundRecord | RunHeader)]
            drop |= set(rest[: len(rest) // 2])
        self.dropped += sum(i in drop for i in rounds)
        self._records = [one for i, one in enumerate(self._records) if i not in drop]
        self._sizes = [size for i, size in enumerate(self._sizes) if i not in drop]
        self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file in one step, so that it can be read at any moment."""
        if self.path is None:
            return
        new = self.path.with_name(self.path.name + ".new")
        try:
            with open(self.path, "rb") as old, open(new, "wb") as file:
                file.write(old.read(self._before))
                file.write("".join(as_line(one) for one in self._records).encode())
            os.replace(new, self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Keep the record in memory only, and say so once."""
        log.warning(
            "the record of the run cannot be written to %s: %s. Training goes on without it; the summary at the end "
            "does not need the file.",
            self.path,
            error,
        )
        self.path = None


def _end_line(path: Path) -> int:
    """End the last line of a file, which a run that was killed may have left open, and return the file's size."""
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        if size and (file.seek(-1, 2), file.read())[1] != b"\n":
            size += file.write(b"\n")
    return size
