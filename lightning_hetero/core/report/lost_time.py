"""Time that the others waited for stragglers, from their begins and ends and the rounds between."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.report.records import StragglerRecord
from lightning_hetero.core.report.run_record import RunRecord

__all__ = ["StragglerSpan", "lost_time", "straggler_spans"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StragglerSpan:
    """One straggler of a run; its begin or its end may be missing.

    Args:
        known: its begin, or its end if the begin is missing.
        begin: its first line.
        end: its last line, ``None`` if it lasts or the run was killed.
        first: round with which it was found.
        lost: seconds that the others waited for it in each round since then.

    Example:
        >>> begin = StragglerRecord(1.0, "begin", 0, "data", 0, 5, cost=0.1, lost=0.5)
        >>> StragglerSpan(begin, begin, None, 3, (0.5, 1.0)).total
        1.5
    """

    known: StragglerRecord
    begin: StragglerRecord | None
    end: StragglerRecord | None
    first: int
    lost: tuple[float, ...]

    @property
    def total(self) -> float:
        """Seconds that the others waited for it."""
        return float(sum(self.lost))


def straggler_spans(run: RunRecord) -> list[StragglerSpan]:
    """Return the stragglers of a run in the order in which they were found.

    Lines say what a straggler had cost when it was found, and when it ended. What lies between is shared out among the
    rounds by their steps. One that has no end goes on to cost in each step what it did when it was found.

    Example:
        >>> from lightning_hetero.core.report.records import RoundRecord, RunHeader
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> rounds = tuple(RoundRecord(float(i), 0, 10 * i, 10, 8, (4, 4)) for i in (1, 2, 3))
        >>> begin = StragglerRecord(1.0, "begin", 0, "data", 0, 5, cost=0.1, lost=0.5)
        >>> straggler_spans(RunRecord(header, rounds, stragglers=(begin,)))[0].lost
        (0.5, 1.0, 1.0)
    """
    times, counts = [one.time for one in run.rounds], [one.count for one in run.rounds]
    found = []
    for known, begins, end in _pairs(run.stragglers):
        begin = known if begins else None
        last = len(times) if end is None else bisect_left(times, end.time)
        first = max(last - 1, 0) if begin is None else bisect_left(times, begin.time)
        found.append(StragglerSpan(known, begin, end, first, _lost(begin, end, counts[first + 1 : last])))
    return found


def lost_time(spans: Sequence[StragglerSpan]) -> float:
    """Return the seconds that were lost by stragglers; of several at once, a round waits for the one that costs most.

    Example:
        >>> found = StragglerRecord(1.0, "begin", 0, "data", 0, 5, cost=0.1, lost=0.5)
        >>> spans = [StragglerSpan(found, found, None, i, lost) for i, lost in ((3, (1.0, 2.0)), (4, (0.5, 0.25)))]
        >>> lost_time(spans)
        3.25
    """
    lost: Array = np.zeros(max((one.first + len(one.lost) for one in spans), default=0))
    for one in spans:
        part = slice(one.first, one.first + len(one.lost))
        lost[part] = np.maximum(lost[part], one.lost)
    return float(lost.sum())


def _pairs(lines: Sequence[StragglerRecord]) -> list[tuple[StragglerRecord, bool, StragglerRecord | None]]:
    """Return the first line of each straggler, whether that is its begin, and the line of its end."""
    found: list[tuple[StragglerRecord, bool, StragglerRecord | None]] = []
    for one in lines:
        same = [
            i for i, (known, _, end) in enumerate(found)
            if end is None and (known.rank, known.phase) == (one.rank, one.phase)
        ]  # fmt: skip
        if one.event == "begin":
            found.append((one, True, None))
        elif same:
            found[same[-1]] = found[same[-1]][0], True, one
        else:
            found.append((one, False, one))
    return found


def _lost(begin: StragglerRecord | None, end: StragglerRecord | None, counts: Sequence[int]) -> tuple[float, ...]:
    """Return what a straggler cost in the round with which it was found, and in each round before it ended."""
    if begin is None:
        return (0.0 if end is None else end.lost,)
    if end is None:
        return begin.lost, *(begin.cost * count for count in counts)
    rest, steps = max(end.lost - begin.lost, 0.0), sum(counts)
    if not steps:
        return (begin.lost + rest,)
    return begin.lost, *(rest * count / steps for count in counts)
