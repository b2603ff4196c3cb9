"""File of a run's record: lines are appended, its size is bounded, and a disk that fails ends the file, not the run."""

import logging
import os
from collections.abc import Container
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.records import FILE_NAME, EndRecord, Record, RoundRecord, RunHeader
from lightning_hetero.core.report.run_record import RunRecord

__all__ = ["RunFile"]

log = logging.getLogger("lightning_hetero")

REMAINS = 0.75
"""Share of the budget that thinning leaves at most."""
MEANS = ("step_time", "data", "forward", "backward", "optimizer", "sync", "link", "predicted", "even", "rows")
"""Fields of a round of which a merged one has the mean."""
NEWEST = ("error", "nodes", "gamma", "t_o", "t_u", "jitter", "sample")
"""Fields of a round of which a merged one has the newest that is known."""


class RunFile:
    """Records of one run, in memory and, once a folder is known, in a file.

    When the lines exceed their budget, every other sync round is merged into the next one of the same split, the first
    and the last excepted. Changes, gains and stragglers stay until they alone exceed it, and so do the last rounds of
    each split.

    Args:
        max_bytes: budget of the lines.

    Attributes:
        path: the file, ``None`` before :meth:`open` and after an error.
        dropped: lines that were merged into others or dropped.
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
        self._append(b"".join(map(_line, self._records)))

    def write(self, record: Record) -> None:
        """Add a record."""
        line = _line(record)
        self._records.append(record)
        self._sizes.append(len(line))
        if sum(self._sizes) > self.max_bytes and not isinstance(record, EndRecord):
            self._thin()
        else:
            self._append(line)

    def _append(self, lines: bytes) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "ab") as file:
                file.write(lines)
        except OSError as error:
            self._give_up(error)

    def _thin(self) -> None:
        """Merge every other round into the next one, and drop the older half of all else if that is not enough."""
        rounds = {i: one for i, one in enumerate(self._records) if isinstance(one, RoundRecord)}
        order = list(rounds)
        pairs = dict(zip(order[1:-1:2], order[2::2], strict=False))
        within = {i: j for i, j in pairs.items() if _same_split(rounds[i], rounds[j])}
        merged = within if self._size_without(within) <= REMAINS * self.max_bytes else pairs
        drop = set(merged)
        if self._size_without(drop) > REMAINS * self.max_bytes:
            rest = [i for i, one in enumerate(self._records) if not isinstance(one, RoundRecord | RunHeader)]
            drop |= set(rest[: len(rest) // 2])
        self.dropped += len(drop)
        for i, following in merged.items():
            self._records[following] = _merged(rounds[i], rounds[following])
        self._records = [one for i, one in enumerate(self._records) if i not in drop]
        self._sizes = [len(_line(one)) for one in self._records]
        self._rewrite()

    def _size_without(self, drop: Container[int]) -> int:
        return sum(size for i, size in enumerate(self._sizes) if i not in drop)

    def _rewrite(self) -> None:
        """Replace the file in one step, so that it can be read at any moment."""
        if self.path is None:
            return
        new = self.path.with_name(self.path.name + ".new")
        try:
            with open(self.path, "rb") as old, open(new, "wb") as file:
                file.write(old.read(self._before))
                file.write(b"".join(map(_line, self._records)))
            os.replace(new, self.path)
        except OSError as error:
            with suppress(OSError):  # such as that of a disk that can only be read by now
                new.unlink()
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


def _line(record: Record) -> bytes:
    """Return the line of a record; what no encoding has, such as a command's bytes that are no text, becomes ``?``."""
    return as_line(record).encode(errors="replace")


def _same_split(one: RoundRecord, other: RoundRecord) -> bool:
    return (one.sizes, one.accumulation) == (other.sizes, other.accumulation)


def _merged(one: RoundRecord, following: RoundRecord) -> RoundRecord:
    """Return a round for the steps of two; its times are their means over steps, those of the second at a new split."""
    counts = one.count, following.count
    whole = replace(following, count=sum(counts))
    if not _same_split(one, following):
        return whole
    values = {name: (getattr(one, name), getattr(following, name)) for name in (*MEANS, *NEWEST)}
    means = {name: _mean(values[name], counts) for name in MEANS}
    newest = {name: _newest(values[name]) for name in NEWEST}
    return replace(whole, timed=one.timed + following.timed, **means, **newest)


def _mean(values: tuple[Any, Any], counts: tuple[int, int]) -> Any:
    """Return the mean over steps, by worker where there is a value for each; one that is not known does not count."""
    if all(isinstance(value, tuple) and value for value in values):
        return tuple(_mean(pair, counts) for pair in zip(*values, strict=True))
    if not all(map(_is_known, values)) or not sum(counts):
        return _newest(values)
    return (values[0] * counts[0] + values[1] * counts[1]) / sum(counts)


def _newest(values: tuple[Any, Any]) -> Any:
    """Return the second of two values, unless only the first one is known."""
    return values[0] if _is_known(values[0]) and not _is_known(values[1]) else values[1]


def _is_known(value: Any) -> bool:
    return bool(value != () and value == value)


def _end_line(path: Path) -> int:
    """End the last line of a file, which a run that was killed may have left open, and return the file's size."""
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        if size and (file.seek(-1, 2), file.read())[1] != b"\n":
            size += file.write(b"\n")
    return size
