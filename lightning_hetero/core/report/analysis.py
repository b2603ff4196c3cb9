"""Figures of a recorded run: what the split gained, and each worker's part in it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.report.lost_time import lost_time, straggler_spans
from lightning_hetero.core.report.records import RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels

__all__ = ["PHASES", "RunFigures", "WorkerFigures", "cluster_of", "even_of", "is_even"]

Array = npt.NDArray[np.float64]

PHASES = ("data", "forward", "backward", "optimizer")
"""Phases in which a worker itself is busy."""


def cluster_of(one: RoundRecord) -> ClusterTimeModel | None:
    """Return the time model of a sync round, ``None`` if it had none.

    Example:
        >>> model = {"nodes": ((0.001, 0.0, 0.002, 0.0),) * 2, "gamma": 1.0, "t_o": 0.0, "t_u": 0.01}
        >>> round(cluster_of(RoundRecord(1.0, 0, 9, 10, 8, (6, 2), **model)).step_time((6, 2)), 3)
        0.028
    """
    if not one.nodes:
        return None
    return ClusterTimeModel(NodeModels(np.array(one.nodes, dtype=float)), one.gamma, one.t_o, one.t_u)


def is_even(sizes: Sequence[int]) -> bool:
    """Return whether sizes differ by one sample at most.

    Example:
        >>> is_even((4, 4, 5)), is_even((6, 2))
        (True, False)
    """
    return max(sizes) - min(sizes) <= 1


@checked_keywords
@dataclass(frozen=True)
class WorkerFigures:
    """One worker at the end of a run; phases are seconds of a step.

    Args:
        rank: its rank.
        size: samples of a micro-batch that it ran, on average.
        share: their share of the batch.
        rate: samples per second, waiting included.
        compute: seconds that it is busy in a step.
        waiting: seconds of a step in which it waits for others or for the link.
        idle: their share of the step.
        phases: seconds of each phase.
        max_local: most samples that fit into its memory, ``None`` for no bound.

    Example:
        >>> WorkerFigures(0, 6, 0.75, 60.0, 0.09, 0.01, 0.1, {"data": 0.0}, None).share
        0.75
    """

    rank: int
    size: float
    share: float
    rate: float
    compute: float
    waiting: float
    idle: float
    phases: dict[str, float]
    max_local: int | None


@checked_keywords
@dataclass(frozen=True)
class RunFigures:
    """Figures of a run; *at the end* means over the last rounds that all had the final split.

    Args:
        run: the record.

    Example:
        >>> from lightning_hetero.core.report.records import RunHeader
        >>> header = RunHeader(0, "0.2.0", "Trainer", "hetero_ddp", "perf_model", (), 8)
        >>> busy = {"data": (0.0, 0.0), "forward": (0.03, 0.03), "backward": (0.06, 0.06), "optimizer": (0.0, 0.0)}
        >>> one = RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=0.1, even=0.2, **busy)
        >>> figures = RunFigures(RunRecord(header, (one,)))
        >>> figures.speed_up, round(figures.idle, 3)
        (2.0, 0.1)
    """

    run: RunRecord

    @cached_property
    def timed(self) -> tuple[RoundRecord, ...]:
        """Rounds with measured steps."""
        return tuple(one for one in self.run.rounds if one.timed and math.isfinite(one.step_time))

    @cached_property
    def last(self) -> tuple[RoundRecord, ...]:
        """Rounds at the end, all with the final split."""
        return _alike(reversed(self.timed))[::-1]

    @cached_property
    def first(self) -> tuple[RoundRecord, ...]:
        """Rounds at the start, all with the first split."""
        return _alike(self.timed)

    # steps

    @property
    def step_time(self) -> float:
        """Measured seconds of a step at the end, NaN if nothing was timed."""
        return _mean(self.last, [one.step_time for one in self.last])

    @property
    def step_time_before(self) -> float:
        """Measured seconds of a step of equal sizes at the start, NaN if the run began with other sizes."""
        if not self.first or not is_even(self.first[0].sizes):
            return math.nan
        return _mean(self.first, [one.step_time for one in self.first])

    @property
    def baseline(self) -> str:
        """The split that speeds are compared with: even sizes, or equal work where batches are divided by cost."""
        return "equal work" if self.run.header.by_cost else "even sizes"

    @property
    def over(self) -> str:
        """The speed-up as text; *predicted* if no step of the baseline is among those at the end."""
        if not math.isfinite(self.speed_up):
            return ""
        predicted = "" if all(is_even(one.sizes) for one in self.last) else " (predicted)"
        return f"{self.speed_up:.2f}x over {self.baseline}{predicted}"

    @property
    def even(self) -> float:
        """Seconds of a step of equal sizes at the end, measured if the split is even, else by the time model."""
        return _mean(self.last, [even_of(one) for one in self.last])

    @property
    def predicted(self) -> float:
        """Predicted seconds of a step at the end."""
        return _mean(self.last, [one.predicted for one in self.last])

    @property
    def speed_up(self) -> float:
        """Speed over equal sizes at the end, over the rounds in which both are known."""
        return _ratio(self.last, even_of, lambda one: one.step_time)

    @property
    def speed_up_of_run(self) -> float:
        """Speed over equal sizes in the whole run, the steps before the first change included."""
        return _ratio(self.timed, even_of, lambda one: one.step_time)

    @property
    def rate(self) -> float:
        """Samples per second of all workers at the end."""
        one = self.last[-1] if self.last else None
        return math.nan if one is None else one.total * one.accumulation / self.step_time

    @property
    def optimum(self) -> float:
        """Seconds of a step of the best split by the newest time model, within the bounds."""
        one = self.last[-1] if self.last else None
        cluster = None if one is None else cluster_of(one)
        if one is None or cluster is None:
            return math.nan
        low, high = self.bounds(one)
        if one.total % self.multiple or sum(low) > one.total or (high is not None and sum(high) < one.total):
            return math.nan  # bounds that no split of this total keeps
        found = solve_optperf(cluster, one.total, min_local=low, max_local=high, multiple=self.multiple).step_time
        return math.nan if found is None else float(found)

    @property
    def share_of_optimum(self) -> float:
        """Measured step without what the best split would save, by the newest time model, over the measured step."""
        one = self.last[-1] if self.last else None
        cluster = None if one is None else cluster_of(one)
        if one is None or cluster is None:
            return math.nan
        saving = float(cluster.step_time(one.sizes)) - self.optimum
        return float(np.clip(1.0 - saving / self.step_time, 0.0, 1.0))

    @property
    def share_of_solo(self) -> float:
        """Rate over the sum of the rates that the workers have while they are busy."""
        solo = sum(one.size * self.last[-1].accumulation / one.compute for one in self.workers_busy)
        return self.rate / solo if solo > 0 else math.nan

    @property
    def workers_busy(self) -> tuple[WorkerFigures, ...]:
        """Workers that take some time."""
        return tuple(one for one in self.workers if one.compute > 0)

    def bounds(self, one: RoundRecord) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the least and the most samples of each worker in a round."""
        low = tuple(worker.min_local for worker in self.run.header.workers)
        return low if len(low) == len(one.sizes) else (1,) * len(one.sizes), one.max_local or None

    @property
    def multiple(self) -> int:
        """Samples of which each size was a multiple."""
        text = self.run.header.settings.get("local_batch_multiple", "1")[:9]
        return max(int(text), 1) if text.isdecimal() else 1

    # workers

    @cached_property
    def workers(self) -> tuple[WorkerFigures, ...]:
        """Workers at the end, by rank."""
        if not self.last:
            return ()
        newest, step = self.last[-1], self.step_time
        phases = {name: self.phase(name) for name in PHASES}
        ran = np.average([one.ran for one in self.last], axis=0, weights=[max(one.count, 1) for one in self.last])
        compute = sum(phases.values(), np.zeros(len(newest.sizes)))
        return tuple(
            WorkerFigures(
                rank=rank,
                size=size,
                share=size / newest.total,
                rate=size * newest.accumulation / step,
                compute=float(compute[rank]),
                waiting=max(step - float(compute[rank]), 0.0),
                idle=float(np.clip(1.0 - compute[rank] / step, 0.0, 1.0)),
                phases={name: float(seconds[rank]) for name, seconds in phases.items()},
                max_local=newest.max_local[rank] if newest.max_local else None,
            )
            for rank, size in enumerate(ran.tolist())
        )

    def phase(self, name: str) -> Array:
        """Return the seconds of a phase in a step at the end, of each worker."""
        rows = np.array([getattr(one, name) for one in self.last], dtype=float)
        weights = np.array([one.count for one in self.last], dtype=float)
        return np.asarray(self.last[-1].accumulation * np.average(rows, axis=0, weights=weights))

    @property
    def idle(self) -> float:
        """Share of all workers' time at the end that is neither loading, nor forward, backward or update."""
        return float(np.mean([one.idle for one in self.workers])) if self.workers else math.nan

    @property
    def link_share(self) -> float:
        """Share of the step at the end in which even the last worker waits for the all-reduce."""
        return _ratio(self.last, lambda one: one.link, lambda one: one.step_time)

    @property
    def lost(self) -> float:
        """Seconds that workers have waited for named stragglers."""
        return lost_time(straggler_spans(self.run))


def even_of(one: RoundRecord) -> float:
    """Return the seconds of a step of equal sizes in a round: measured if the split is even, else predicted.

    Example:
        >>> even_of(RoundRecord(1.0, 0, 9, 10, 8, (4, 4), step_time=0.2, even=0.3))
        0.2
        >>> even_of(RoundRecord(1.0, 0, 9, 10, 8, (6, 2), step_time=0.1, even=0.2))
        0.2
    """
    return one.step_time if sorted(one.sizes) == sorted(even_sizes(one.total, len(one.sizes))) else one.even


def _alike(rounds: Iterable[RoundRecord]) -> tuple[RoundRecord, ...]:
    """Return the first rounds that have the same split."""
    found: list[RoundRecord] = []
    for one in rounds:
        if found and (one.sizes, one.accumulation) != (found[0].sizes, found[0].accumulation):
            break
        found.append(one)
    return tuple(found)


def _mean(rounds: Sequence[RoundRecord], values: Sequence[float]) -> float:
    """Return the mean over steps of values of rounds, NaN without any finite one."""
    pairs = [(value, one.count) for value, one in zip(values, rounds, strict=True) if math.isfinite(value)]
    steps = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / steps if steps else math.nan


def _ratio(
    rounds: Sequence[RoundRecord], value: Callable[[RoundRecord], float], base: Callable[[RoundRecord], float]
) -> float:
    """Return the mean of a value over that of another, over the rounds in which both are known; NaN without any."""
    known = [one for one in rounds if math.isfinite(value(one)) and math.isfinite(base(one))]
    taken = sum(one.count * base(one) for one in known)
    return sum(one.count * value(one) for one in known) / taken if taken > 0 else math.nan
