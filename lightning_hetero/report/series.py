"""Values of a run over its steps: where its rounds and changes lie, and what is drawn of them."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.report.analysis import RunFigures, even_of
from lightning_hetero.core.report.records import RoundRecord
from lightning_hetero.core.report.run_record import RunRecord

__all__ = ["RoundSeries", "StepAxis", "model_error", "round_series", "share_of_solo", "shown_workers", "thinned"]

Array = npt.NDArray[np.float64]

MOST_ROUNDS = 400
"""Rounds that a figure shows."""
MOST_WORKERS = 16
"""Workers that figures and tables show one by one."""


@dataclass(frozen=True)
class RoundSeries:
    """Values of the rounds that figures show, by the step at which each round was held.

    Args:
        steps: synchronized steps up to the round.
        last: step up to which anything is known.
        starts: steps before its split began: up to the round before, or to a change since then.
        sizes: samples that each worker ran in the steps before it, shape ``(rounds, workers)``.
        total: samples of a step.
        step_time: measured seconds of a step.
        predicted: predicted seconds of it.
        error: standard error of the prediction.
        even: seconds of a step of equal sizes.
        share_of_optimum: what is left of the measured step without what the best split would save, as a share of it.
        share_of_solo: rate over the summed rates of the workers while they are busy.
        link: seconds of the all-reduce that even the last worker waits for.
        density: share of the gradient that is sent.
        noise_scale: gradient noise scale.
        goodput: statistical efficiency times samples/s.
    """

    steps: Array
    last: float
    starts: Array
    sizes: Array
    total: Array
    step_time: Array
    predicted: Array
    error: Array
    even: Array
    share_of_optimum: Array
    share_of_solo: Array
    link: Array
    density: Array
    noise_scale: Array
    goodput: Array


class StepAxis:
    """Axis of synchronized steps, on which rounds, changes and stragglers have their places.

    Args:
        run: the record.

    Attributes:
        ends: synchronized steps up to each round.
    """

    def __init__(self, run: RunRecord) -> None:
        self.ends = np.cumsum([one.count for one in run.rounds], dtype=float)
        self._rounds = run.rounds
        self._places = [(one.epoch, one.step) for one in run.rounds]

    def at(self, epoch: int, step: int) -> float:
        """Return how many synchronized steps come before a batch of an epoch.

        A step has ``accumulation`` batches, as in the first round behind it. They are counted back from that round, if
        it is in the same epoch, or on from the round before, if that is; else back to the beginning of the epoch of the
        round behind, with epochs between as long as each other. Behind the last round, steps are counted on from there.
        """
        i = bisect_left(self._places, (epoch, step))
        if not self._rounds:
            return 0.0
        last = i == len(self._rounds)
        each = self._rounds[i - last].accumulation
        before, since = (float(self.ends[i - 1]), self._places[i - 1]) if i else (0.0, (0, -1))
        on = before + (step - since[1] - 1 if epoch == since[0] else step) / each
        if last:
            return max(on, before)
        until, (its_epoch, its_step) = float(self.ends[i]), self._places[i]
        if epoch == its_epoch:
            return min(max(until - (its_step + 1 - step) / each, before), until)
        begin = max(until - (its_step + 1) / each, before)
        if epoch != since[0]:
            on = before + (begin - before) * (epoch - since[0]) / (its_epoch - since[0])
        return min(on, begin)


def thinned(rounds: Sequence[RoundRecord], most: int = MOST_ROUNDS) -> list[int]:
    """Return the rounds that a figure shows: all, or some at equal distances and those around changes of the split."""
    if len(rounds) <= most:
        return list(range(len(rounds)))
    spread = {round(i) for i in np.linspace(0, len(rounds) - 1, most // 2)}
    around = {i + j for i in range(1, len(rounds)) if rounds[i].sizes != rounds[i - 1].sizes for j in (-1, 0)}
    if len(spread | around) <= most:
        return sorted(spread | around)
    return [round(i) for i in np.linspace(0, len(rounds) - 1, most)]


def round_series(run: RunRecord, most: int = MOST_ROUNDS) -> RoundSeries:
    """Return the values of the rounds that figures show."""
    order = thinned(run.rounds, most)
    chosen = [run.rounds[i] for i in order]
    axis = StepAxis(run)
    ends = axis.ends
    changes = [(axis.at(one.epoch, one.step), one.sizes) for one in run.changes]

    def start(i: int) -> float:
        before = float(ends[i - 1]) if i else 0.0
        if not i or run.rounds[i].sizes == run.rounds[i - 1].sizes:
            return before
        return max(
            (x for x, sizes in changes if sizes == run.rounds[i].sizes and before <= x <= ends[i]), default=before
        )

    alone = [RunFigures(replace(run, rounds=(one,))) for one in chosen]

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=float).reshape(len(chosen))

    return RoundSeries(
        steps=ends[order],
        last=max([0.0, *ends[-1:].tolist(), *(x for x, _ in changes)]),
        starts=column([start(i) for i in order]),
        sizes=np.array([one.ran for one in chosen], dtype=float).reshape(
            len(chosen), len(chosen[0].sizes) if chosen else 0
        ),
        total=column([one.total * one.accumulation for one in chosen]),
        step_time=column([figures.step_time for figures in alone]),
        predicted=column([one.predicted for one in chosen]),
        error=column([one.error for one in chosen]),
        even=column([even_of(one) for one in chosen]),
        share_of_optimum=column([figures.share_of_optimum for figures in alone]),
        share_of_solo=column([share_of_solo(figures) for figures in alone]),
        **{name: column([getattr(o, name) for o in chosen]) for name in ("link", "density", "noise_scale", "goodput")},
    )


def share_of_solo(figures: RunFigures) -> float:
    """Return the rate over the summed rates of the workers while they are busy, NaN if it is not known."""
    return figures.share_of_solo if figures.workers_busy else math.nan


def model_error(run: RunRecord) -> float:
    """Return the mean relative difference between predicted and measured step time over the rounds that have both."""
    pairs = [(one.predicted, one.step_time) for one in run.rounds if one.timed]
    errors = [abs(p / m - 1.0) for p, m in pairs if math.isfinite(p) and math.isfinite(m)]
    return float(np.mean(errors)) if errors else math.nan


def shown_workers(figures: RunFigures, most: int = MOST_WORKERS) -> list[int]:
    """Return the ranks that are shown one by one: all, or those that are busy longest and those that wait longest."""
    workers = figures.workers
    if not workers:
        return list(range(min(figures.run.workers, most)))
    if len(workers) <= most:
        return [one.rank for one in workers]
    order = sorted(workers, key=lambda one: (-one.compute, one.rank))
    return sorted(one.rank for one in [*order[: most // 2], *order[-(most - most // 2) :]])
