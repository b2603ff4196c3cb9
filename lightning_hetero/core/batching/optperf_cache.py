"""Cache of the optimal step times of all candidate totals from one decision to the next (C sec. 4.5)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_hetero.core.batching.goodput import (
    TOTAL_DEFAULTS,
    Candidate,
    TotalSettings,
    Window,
    goodput_of,
    windows_of,
)
from lightning_hetero.core.batching.optperf import overlap_state, solve_step_times
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.timing.step_time import ClusterTimeModel

__all__ = ["SolvedTotals", "goodput_table"]


@dataclass(frozen=True, slots=True)
class _Solved:
    """OptPerf of one candidate.

    Args:
        seconds: step time by the newest model for which it was solved.
        initial: step time when all candidates were last solved together.
        overlap: overlap state at that time, see :func:`~lightning_hetero.core.batching.optperf.overlap_state`.
    """

    seconds: float
    initial: float
    overlap: bytes


@checked_keywords
@dataclass(frozen=True)
class SolvedTotals:
    """OptPerf of all candidates, kept from one choice of the total to the next (C sec. 4.5).

    All candidates are solved together once. Later choices use these times and the newest noise scale; only the chosen
    candidate is solved for the newest time model. While its overlap state (the workers that computing limits) is
    unchanged, its time is renewed and the others are kept; otherwise all are solved anew.

    A change of a worker's speed may leave every overlap state unchanged; the renewed total would then compete with
    outdated times. So all candidates are also solved anew if the time of a renewed one has changed by more than 1 %
    since all were solved.

    Args:
        min_local: fewest samples of each worker and micro-batch in the solution.
        max_local: most samples of each worker and micro-batch, ``None`` for no limit.
        multiple: samples of which each size is a multiple.
        solved: solution of each total and number of micro-batches.

    Example:
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.001, 0.1, 0, 0),) * 2)
        >>> known = SolvedTotals.solve(cluster, [(100, 1), (200, 1)], (1, 1), None)
        >>> [round(seconds, 3) for seconds in known.times([(100, 1), (200, 1)]).values()]
        [0.15, 0.2]
        >>> slower = ClusterTimeModel((NodeTimeModel(0.00101, 0.1, 0, 0),) * 2)
        >>> [round(seconds, 4) for seconds in known.renewed(slower, [(200, 1)]).times([(100, 1), (200, 1)]).values()]
        [0.15, 0.201]
        >>> known.renewed(ClusterTimeModel((NodeTimeModel(0.002, 0.1, 0, 0),) * 2), [(200, 1)]) is None
        True
    """

    min_local: tuple[int, ...] = ()
    max_local: tuple[int, ...] | None = None
    multiple: int = 1
    solved: Mapping[Window, _Solved] = field(default_factory=dict)

    @classmethod
    def solve(
        cls,
        cluster: ClusterTimeModel,
        windows: Iterable[Window],
        min_local: Sequence[int],
        max_local: Sequence[int] | None,
        multiple: int = 1,
    ) -> "SolvedTotals":
        """Solve all candidates together.

        Args:
            cluster: time model of one micro-batch.
            windows: each total with the number of its micro-batches.
            min_local: fewest samples of each worker and micro-batch.
            max_local: most samples of each worker and micro-batch.
            multiple: samples of which each size is a multiple.
        """
        known = cls(tuple(min_local), None if max_local is None else tuple(max_local), multiple)
        return replace(known, solved=known._solve(cluster, windows))

    def _solve(self, cluster: ClusterTimeModel, windows: Iterable[Window]) -> dict[Window, _Solved]:
        groups: dict[int, list[int]] = {}
        for total, count in windows:
            groups.setdefault(count, []).append(total)
        solved = {}
        for count, totals in groups.items():
            whole = cluster.accumulated(count)
            # Micro-batches whose mean is no whole number differ by one sample; the bounds have to hold the larger ones.
            sizes = np.append(np.asarray(totals) / count, -(-max(totals) // count))
            unit, low, high = self.multiple, self.min_local, self.max_local
            sizes = sizes if unit == 1 else np.ceil(sizes / unit) * unit
            times = solve_step_times(whole, sizes, min_local=low, max_local=high, multiple=unit)[:-1]
            for total, seconds, overlap in zip(totals, times.tolist(), overlap_state(whole, times), strict=True):
                solved[total, count] = _Solved(seconds, seconds, overlap)
        return solved

    def holds(
        self,
        windows: Iterable[Window],
        min_local: Sequence[int],
        max_local: Sequence[int] | None,
        multiple: int = 1,
    ) -> bool:
        """Return whether these candidates are solved for these bounds."""
        bounds = tuple(min_local), None if max_local is None else tuple(max_local), multiple
        return (self.min_local, self.max_local, self.multiple) == bounds and self.solved.keys() >= {*windows}

    def times(self, windows: Iterable[Window]) -> dict[Window, float]:
        """Return the seconds of an optimizer step at the optimal split of each of these candidates."""
        return {window: self.solved[window].seconds for window in windows}

    def renewed(
        self, cluster: ClusterTimeModel, windows: Iterable[Window], settings: TotalSettings = TOTAL_DEFAULTS
    ) -> "SolvedTotals | None":
        """Solve these candidates for the newest model; ``None`` if that shows all kept times to be outdated.

        Args:
            cluster: time model of one micro-batch.
            windows: candidates whose times a choice rests on.
            settings: of the total; only ``max_drift`` is used.
        """
        solved = dict(self.solved)
        for window, newest in self._solve(cluster, windows).items():
            before = solved[window]
            drift = abs(newest.seconds - before.initial)
            if newest.overlap != before.overlap or drift > settings.max_drift * before.initial:
                return None
            solved[window] = replace(before, seconds=newest.seconds)
        return replace(self, solved=solved)

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        rows = [[*window, s.seconds, s.initial, s.overlap.hex()] for window, s in self.solved.items()]
        bounds = None if self.max_local is None else list(self.max_local)
        return {"min_local": list(self.min_local), "max_local": bounds, "multiple": self.multiple, "solved": rows}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "SolvedTotals":
        """Return the cache restored from :meth:`state_dict`."""
        solved = {
            (int(total), int(count)): _Solved(float(seconds), float(initial), bytes.fromhex(overlap))
            for total, count, seconds, initial, overlap in state["solved"]
        }
        bounds = state["max_local"]
        most = None if bounds is None else tuple(map(int, bounds))
        return cls(tuple(map(int, state["min_local"])), most, int(state.get("multiple", 1)), solved)


def goodput_table(
    cluster: ClusterTimeModel,
    totals: Sequence[int],
    *,
    noise_scale: float,
    initial_total: int,
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
    micro_batch_limit: int | None = None,
    accumulation: int | None = None,
) -> tuple[Candidate, ...]:
    """Return the goodput of every candidate; totals beyond the memory of all workers run as equal micro-batches.

    Totals that the bounds do not allow, in any number of micro-batches, are left out.

    Args:
        cluster: time model of one micro-batch.
        totals: candidates for ``B``.
        noise_scale: ``phi``, as in :func:`efficiency`.
        initial_total: ``B_0``.
        min_local: fewest samples of each worker and micro-batch.
        max_local: most samples of each worker and micro-batch.
        micro_batch_limit: most samples of all workers in a micro-batch; by default the sum of ``max_local``.
        accumulation: number of micro-batches; by default as few as the limit allows.

    Example:
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.001, 0.1, 0, 0),) * 2)
        >>> table = goodput_table(cluster, [100, 200], noise_scale=100, initial_total=100, min_local=(1, 1))
        >>> [round(c.throughput) for c in table], [round(c.efficiency, 3) for c in table]
        ([667, 1000], [1.0, 0.667])
    """
    windows = windows_of(
        totals,
        min_local=min_local,
        max_local=max_local,
        micro_batch_limit=micro_batch_limit,
        accumulation=accumulation,
    )
    solved = SolvedTotals.solve(cluster, windows, min_local, max_local)
    return goodput_of(solved.times(windows), noise_scale=noise_scale, initial_total=initial_total)
