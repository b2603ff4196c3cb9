"""Choice of the total batch size by goodput (Cannikin, sec. 4.1 and 4.5; Pollux).

``goodput(B) = throughput(B) * efficiency(B)`` with ``throughput(B) = B / T(B)``, ``T`` the OptPerf of that total, and
``efficiency(B) = (noise_scale + B_0) / (noise_scale + B)``, the progress of a sample relative to one at ``B_0``.
OptPerf does not depend on the progress of training, so that what was solved is kept: :class:`SolvedTotals`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_hetero.core.batching.optperf import overlap_state, solve_step_times
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.validation import check_int, check_number

__all__ = [
    "Candidate",
    "SolvedTotals",
    "Window",
    "candidate_totals",
    "choose_total",
    "efficiency",
    "goodput_of",
    "goodput_table",
    "windows_of",
]

DRIFT = 0.01
"""Largest relative change of a step time for which the times of other candidates are kept."""

Window = tuple[int, int]
"""A total, and the number of micro-batches in which it runs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One total batch size and what it promises.

    Args:
        total_batch_size: ``B``, samples of one optimizer step.
        accumulation: micro-batches of that step; more than 1 where the total exceeds the memory of all workers.
        step_time: seconds of an optimizer step at the optimal split.
        throughput: samples per second.
        efficiency: progress per sample relative to the initial total.
        goodput: product of both.

    Example:
        >>> Candidate(64, 1, step_time=0.5, throughput=128.0, efficiency=0.75, goodput=96.0).accumulation
        1
    """

    total_batch_size: int
    accumulation: int
    step_time: float
    throughput: float
    efficiency: float
    goodput: float


def efficiency(total_batch_size: float, noise_scale: float, initial_total: float) -> float:
    """Statistical efficiency of a sample at ``B`` relative to ``B_0``: ``(phi + B_0) / (phi + B)``.

    Args:
        total_batch_size: ``B``.
        noise_scale: ``phi = tr(Sigma) / |G|^2`` in samples, ``>= 0``; may be infinite (then 1) or unknown (NaN).
        initial_total: ``B_0``.

    Returns:
        Above 1 below ``B_0``, below 1 above it; NaN while the noise scale is unknown.

    Raises:
        ValueError: if the noise scale is negative.

    Example:
        >>> efficiency(300, 100, 100)
        0.5
    """
    if noise_scale < 0:
        raise ValueError(
            f"noise_scale={noise_scale} is negative, as estimates of single steps may be; give the average of many "
            "steps (RunningNoiseScale), or 0."
        )
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + initial_total) / (noise_scale + total_batch_size)


def candidate_totals(smallest: int, largest: int, *, ratio: float = 1.1) -> tuple[int, ...]:
    """Geometric grid of totals between two bounds, both included.

    Args:
        smallest: least total, ``>= 1``.
        largest: greatest total.
        ratio: between neighbours, above 1.

    Raises:
        ValueError: if the bounds are reversed or the ratio is not above 1.

    Example:
        >>> candidate_totals(8, 64, ratio=2)
        (8, 16, 32, 64)
    """
    check_int("smallest", smallest, minimum=1)
    check_number("ratio", ratio, low=1.0, include_low=False)
    if largest < smallest:
        raise ValueError(f"the largest total {largest} is below the smallest, {smallest}. Raise max_total_batch_size.")
    count = math.ceil(math.log(largest / smallest) / math.log(ratio) - 1e-9) + 1
    return tuple(dict.fromkeys(round(float(b)) for b in np.geomspace(smallest, largest, max(count, 1))))


def windows_of(
    totals: Sequence[int],
    *,
    min_local: Sequence[int],
    max_local: Sequence[int] | None = None,
    micro_batch_limit: int | None = None,
    accumulation: int | None = None,
) -> tuple[Window, ...]:
    """Each total with the number of its micro-batches, sorted; without those that the bounds do not allow.

    Args:
        totals: candidates for ``B``.
        min_local: fewest samples of each worker and micro-batch.
        max_local: most samples of each worker and micro-batch.
        micro_batch_limit: most samples of all workers in a micro-batch; by default the sum of ``max_local``.
        accumulation: number of micro-batches; by default as few as the limit allows.

    Example:
        >>> windows_of([1, 8, 12], min_local=(1, 1), max_local=(5, 5))
        ((8, 1), (12, 2))
    """
    limit = sum(max_local) if micro_batch_limit is None and max_local is not None else micro_batch_limit
    windows = []
    for total in sorted(set(totals)):
        count = (1 if limit is None else -(-total // limit)) if accumulation is None else accumulation
        if total >= count * sum(min_local) and (limit is None or -(-total // count) <= limit):
            windows.append((total, count))
    return tuple(windows)


@dataclass(frozen=True, slots=True)
class _Solved:
    """OptPerf of one candidate.

    Args:
        seconds: step time by the newest model that it was solved for.
        initial: step time when all candidates were solved together.
        overlap: overlap state then, see :func:`~lightning_hetero.core.batching.optperf.overlap_state`.
    """

    seconds: float
    initial: float
    overlap: bytes


@dataclass(frozen=True)
class SolvedTotals:
    """OptPerf of all candidates, kept from one choice of the total to the next (Cannikin, sec. 4.5).

    All are solved together once. A later choice is made by these times and the newest noise scale, and only what was
    chosen is solved for the newest time model. While its overlap state (which workers are bound by computing) is the
    one that it had, its time is renewed and the others are kept; else all are solved anew.

    A worker whose speed changes may leave every overlap state as it was, and then a total that is renewed would compete
    with times of the past. So the times that are kept also have to hold: that of no candidate that is renewed may have
    changed by more than 1 % since all were solved.

    Args:
        min_local: fewest samples of each worker and micro-batch for which they were solved.
        max_local: most samples of each worker and micro-batch, ``None`` for no limit.
        solved: what is known of each total and number of micro-batches.

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
    solved: Mapping[Window, _Solved] = field(default_factory=dict)

    @classmethod
    def solve(
        cls,
        cluster: ClusterTimeModel,
        windows: Iterable[Window],
        min_local: Sequence[int],
        max_local: Sequence[int] | None,
    ) -> "SolvedTotals":
        """All candidates, solved together.

        Args:
            cluster: time model of one micro-batch.
            windows: each total with the number of its micro-batches.
            min_local: fewest samples of each worker and micro-batch.
            max_local: most samples of each worker and micro-batch.
        """
        known = cls(tuple(min_local), None if max_local is None else tuple(max_local))
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
            times = solve_step_times(whole, sizes, min_local=self.min_local, max_local=self.max_local)[:-1]
            for total, seconds, overlap in zip(totals, times.tolist(), overlap_state(whole, times), strict=True):
                solved[total, count] = _Solved(seconds, seconds, overlap)
        return solved

    def holds(self, windows: Iterable[Window], min_local: Sequence[int], max_local: Sequence[int] | None) -> bool:
        """Whether these candidates are known, for these bounds."""
        bounds = tuple(min_local), None if max_local is None else tuple(max_local)
        return (self.min_local, self.max_local) == bounds and self.solved.keys() >= {*windows}

    def times(self, windows: Iterable[Window]) -> dict[Window, float]:
        """Seconds of an optimizer step at the optimal split of each of these candidates."""
        return {window: self.solved[window].seconds for window in windows}

    def renewed(self, cluster: ClusterTimeModel, windows: Iterable[Window]) -> "SolvedTotals | None":
        """With these candidates solved for the newest model; ``None`` if with that no candidate is known any more.

        Args:
            cluster: time model of one micro-batch.
            windows: candidates whose times a choice rests on.
        """
        solved = dict(self.solved)
        for window, newest in self._solve(cluster, windows).items():
            before = solved[window]
            if newest.overlap != before.overlap or abs(newest.seconds - before.initial) > DRIFT * before.initial:
                return None
            solved[window] = replace(before, seconds=newest.seconds)
        return replace(self, solved=solved)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint."""
        rows = [[*window, s.seconds, s.initial, s.overlap.hex()] for window, s in self.solved.items()]
        bounds = None if self.max_local is None else list(self.max_local)
        return {"min_local": list(self.min_local), "max_local": bounds, "solved": rows}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "SolvedTotals":
        """What :meth:`state_dict` described."""
        solved = {
            (int(total), int(count)): _Solved(float(seconds), float(initial), bytes.fromhex(overlap))
            for total, count, seconds, initial, overlap in state["solved"]
        }
        bounds = state["max_local"]
        return cls(tuple(map(int, state["min_local"])), None if bounds is None else tuple(map(int, bounds)), solved)


def goodput_of(times: Mapping[Window, float], *, noise_scale: float, initial_total: int) -> tuple[Candidate, ...]:
    """Goodput of candidates whose step times are known, sorted by total.

    Args:
        times: seconds of an optimizer step, by total and number of micro-batches.
        noise_scale: ``phi``, as in :func:`efficiency`.
        initial_total: ``B_0``.

    Example:
        >>> goodput_of({(200, 1): 0.2}, noise_scale=100, initial_total=100)[0].throughput
        1000.0
    """
    table = []
    for (total, count), seconds in times.items():
        share = efficiency(total, noise_scale, initial_total)
        table.append(Candidate(total, count, seconds, total / seconds, share, total / seconds * share))
    return tuple(sorted(table, key=lambda candidate: candidate.total_batch_size))


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
    """Goodput of every candidate; totals beyond the memory of all workers run as equal micro-batches.

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


def choose_total(table: Sequence[Candidate], current: int, *, hysteresis: float = 0.02) -> Candidate:
    """The candidate of the highest goodput, if it promises enough over the current total.

    The total stays as it is while the noise scale, and with it the goodput, is unknown (NaN).

    Args:
        table: candidates, the current total among them.
        current: total that runs now.
        hysteresis: least gain in goodput for which the total is changed, as a share, 0 to 1.

    Raises:
        ValueError: if the current total is not in the table.

    Example:
        >>> table = [Candidate(8, 1, 1, 8, 1, 8.0), Candidate(16, 1, 1, 16, 1, 8.1), Candidate(32, 1, 1, 32, 1, 9.0)]
        >>> choose_total(table, 8).total_batch_size, choose_total(table[:2], 8).total_batch_size
        (32, 8)
    """
    now = next((candidate for candidate in table if candidate.total_batch_size == current), None)
    if now is None:
        known = [candidate.total_batch_size for candidate in table]
        raise ValueError(f"the current total {current} is not among the candidates {known}. Add it to their totals.")
    if math.isnan(now.goodput):
        return now
    best = max(table, key=lambda candidate: candidate.goodput)
    return best if best.goodput >= (1 + hysteresis) * now.goodput else now
