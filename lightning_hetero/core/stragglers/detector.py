"""Detector of stragglers, from the measurements of all workers at each sync round.

The all-reduce makes all workers finish together, so step times alone cannot tell who is slow. Computing times without
waiting can. A worker becomes a straggler when it takes longer than its own past lets expect, and all others wait for
it. Where it was slower from the start, and the split leaves it so for several rounds, it is one as well.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.stragglers.past import Past
from lightning_hetero.core.stragglers.round_times import PHASES, RoundTimes
from lightning_hetero.core.stragglers.settings import StragglerSettings

__all__ = ["LINK", "NOBODY", "Straggler", "StragglerDetector"]

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

LINK = -1
"""Rank that stands for the link, which all workers share."""
NOBODY = -2
"""Rank that stands for no straggler."""

UNTRIED = 0.05
"""Standard error of what a worker is expected to take for a size that it has not run, as a share of it."""
EXPLAINED = 0.7
"""Least part of a worker's time when it was slow, in proportion to its share, if the share alone relieved it."""


@dataclass
class Straggler:
    """One straggler, from its begin to its end.

    Args:
        rank: its rank, :data:`LINK` for the link.
        phase: one of :data:`~lightning_hetero.core.stragglers.round_times.PHASES`, or ``"link"``.
        ago: steps since it began when it was found, as far as these were timed.
        earlier: whether it may have begun before these: the steps just before were not timed.
        cost: seconds that it adds to a step now.
        excess: seconds by which it exceeded what was expected when it was found.
        lasting: whether it was slower from the start.
        lost: seconds that it has cost so far.
        relieved: how it ended: ``"split"`` (its share fell), ``"recovered"``, ``"others"`` (others are slower now),
            ``"slower"`` (it was slow from the start, and is slower still), ``"run ended"``; empty while it lasts.
        slow: its size and computing seconds in the newest round in which others waited for it.
        base: seconds that it added to a step before, when it was a lasting straggler.

    Example:
        >>> Straggler(2, "data", 0, 0.1, 0.1).relieved
        ''
    """

    rank: int
    phase: str
    ago: int
    cost: float
    excess: float
    lasting: bool = False
    lost: float = 0.0
    relieved: str = ""
    earlier: bool = False
    slow: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    sizes: tuple[float, ...] = field(default=(), repr=False)
    base: float = 0.0

    def update(self, cost: float, slow: tuple[float, float] = (0.0, 0.0)) -> None:
        """Set what it adds to a step now, and :attr:`slow`."""
        self.cost, self.slow = float(cost), slow

    def date(self, *, earlier: bool) -> None:
        """Note whether it may have begun before the steps that were timed, unless it has ended."""
        self.earlier = self.earlier if self.relieved else earlier

    def charge(self, steps: int) -> float:
        """Count the seconds that it has cost in some steps, of which it was there in the newest; return them."""
        cost = self.cost * (min(self.ago, steps) if self.lost == 0.0 else steps)
        self.lost += cost
        return cost

    def end(self, how: str) -> None:
        """Note how it ended."""
        self.relieved = how


class StragglerDetector:
    """Detector of the stragglers among some workers; the same observations give the same result on every rank.

    Args:
        workers: number of workers.
        settings: limits of the detection.

    Attributes:
        active: stragglers that last, by rank.
        lost: seconds that all stragglers have cost so far.

    Example:
        >>> sizes, zeros = np.full((8, 3), 8.0), np.zeros((8, 3))
        >>> def steps(*backward):
        ...     busy = np.tile(backward, (8, 1))
        ...     return StepObservations(sizes, zeros, busy, zeros, zeros, zeros, np.full((8, 3), max(backward)))
        >>> detector = StragglerDetector(3)
        >>> detector.observe(steps(0.1, 0.1, 0.1), 8)
        []
        >>> (found,) = detector.observe(steps(0.1, 0.1, 0.15), 8)
        >>> found.rank, found.phase, round(found.cost, 3)
        (2, 'backward', 0.05)
    """

    def __init__(self, workers: int, settings: StragglerSettings = StragglerSettings()) -> None:  # noqa: B008
        self.workers, self.settings = workers, settings
        self.active: dict[int, Straggler] = {}
        self.lost = 0.0
        self._past, self._link = Past(workers, len(PHASES), settings), Past(1, 2, settings)
        self._slower = np.zeros(workers, dtype=int)  # rounds in which others waited for the worker

    @property
    def worst(self) -> int:
        """Rank of the straggler that costs most now, :data:`NOBODY` without one."""
        return max(self.active, key=lambda rank: self.active[rank].cost, default=NOBODY)

    @property
    def _suspicious(self) -> float:
        """Share of the step by which a worker or the link is slower if the next round has to confirm it."""
        return self.settings.ended * self.settings.min_cost

    def observe(self, observations: StepObservations, elapsed: int, accumulation: int = 1) -> list[Straggler]:
        """Judge the steps since the last sync round.

        Args:
            observations: of all workers.
            elapsed: steps since the last round, those without measurements included.
            accumulation: micro-batches of a step.

        Returns:
            Stragglers that begin or end with this round.
        """
        if self.workers == 1 or observations.num_steps < self.settings.min_steps:
            self._charge(elapsed)
            return []
        judged = RoundTimes.of(observations, accumulation, self.settings)
        known = np.isfinite(self._past.sizes)
        resized = bool((known & (judged.sizes != self._past.sizes)).any())
        self._past.resize(judged.sizes)
        self._link.resize(np.ones(1))
        events = self._judge_workers(judged, resized) + self._judge_link(judged)
        self._charge(elapsed)
        for one in events:
            one.date(earlier=one.ago >= len(judged.rows) < elapsed)
        return events

    def _charge(self, steps: int) -> None:
        """Count what the active stragglers cost in some steps; of several, a step waits for one."""
        self.lost += max([one.charge(steps) for one in self.active.values()], default=0.0)

    def _judge_workers(self, judged: RoundTimes, resized: bool) -> list[Straggler]:
        settings, past = self.settings, self._past
        excess = judged.times - past.expected
        beyond = np.nan_to_num(judged.compute - past.expected.sum(axis=1))
        doubt = past.spread + np.where(past.tried, 0.0, UNTRIED**2)
        error = np.sqrt(judged.error**2 + doubt * (judged.compute - beyond) ** 2)
        raised: Flags = beyond > np.maximum(settings.deviations * error, settings.min_cost * judged.step)
        for rank, one in self.active.items():
            if rank != LINK and not one.lasting:
                raised[rank] |= beyond[rank] > settings.ended * one.excess * judged.sizes[rank] / one.sizes[rank]
        cost = self._costs(judged, beyond, raised)
        base = {rank: one.cost for rank, one in self.active.items() if one.lasting}
        events = self._end_workers(judged, raised, cost)
        found: list[int] = np.flatnonzero(raised & (cost > settings.min_cost * judged.step)).tolist()
        for rank in found:
            before = self.active.get(rank)
            if before is not None and before.lasting:  # slow from the start, and now slower than that
                before.end("slower")
                events.append(before)
            if before is None or before.relieved:
                phase = PHASES[int(np.argmax(excess[rank]))]
                ago = judged.steps_since(rank, float(past.expected[rank].sum() + 0.5 * beyond[rank]))
                events.append(self._begin(judged, rank, phase, ago, cost[rank], beyond[rank], base=base.get(rank, 0.0)))
        usual = np.ones(self.workers, dtype=bool)
        usual[[one for one in self.active if one != LINK and not self.active[one].lasting]] = False
        past.learn(judged.times, usual, beyond > self._suspicious * judged.step)
        return events + self._lasting(judged, resized)

    def _costs(self, judged: RoundTimes, beyond: Array, raised: Flags) -> Array:
        """Return what each raised worker, and each lasting straggler, adds to the step: the others' wait for it."""
        cost = np.zeros(self.workers)
        odd = raised.copy()
        odd[[rank for rank, one in self.active.items() if one.lasting]] = True
        others = judged.asks[~odd]
        if not len(others):  # all are slower than before: only the slowest can make the others wait
            others = np.delete(judged.asks, judged.asks.argmax())
        waits = np.maximum(judged.asks - others.max(), 0.0)
        cost[odd] = waits[odd]
        most = beyond.copy()
        for rank, one in self.active.items():
            if rank != LINK:
                most[rank] += one.cost if one.lasting else one.base
        cost[raised] = np.minimum(cost[raised], most[raised])
        return cost

    def _begin(
        self,
        judged: RoundTimes,
        rank: int,
        phase: str,
        ago: int,
        cost: float,
        excess: float,
        *,
        lasting: bool = False,
        base: float = 0.0,
    ) -> Straggler:
        sizes = tuple(judged.sizes.tolist())
        one = Straggler(rank, phase, ago, float(cost), float(excess), lasting, sizes=sizes, base=base)
        one.update(cost, _slow(judged, rank))
        self.active[rank] = one
        return one

    def _least(self, one: Straggler) -> float:
        """Return the least share of the step that such a straggler costs when it begins."""
        return self.settings.min_lasting_cost if one.lasting else self.settings.min_cost

    def _end_workers(self, judged: RoundTimes, raised: Flags, cost: Array) -> list[Straggler]:
        """End the stragglers that others no longer wait for, and update the costs of the rest."""
        ended = []
        for rank, one in self.active.items():
            if rank == LINK:
                continue
            relieved = _smaller_share(judged, rank, one)
            if not one.lasting and not raised[rank]:
                one.end("split" if relieved else "recovered")
            elif cost[rank] < self.settings.ended * self._least(one) * judged.step:
                one.end("split" if relieved else "recovered" if one.lasting else "others")
                self._past.forget([rank], judged.times)
            one.update(cost[rank], _slow(judged, rank))
            if one.relieved:
                self._slower[rank] = 0
                ended.append(one)
        for one in ended:
            del self.active[one.rank]
        return ended

    def _lasting(self, judged: RoundTimes, resized: bool) -> list[Straggler]:
        """Return the worker that others have waited for in several rounds, with nothing done about it."""
        slowest = int(judged.asks.argmax())
        others = np.delete(judged.asks, slowest)
        waits = float(judged.asks[slowest] - others.max())
        slower = waits > self.settings.min_lasting_cost * judged.step and slowest not in self.active
        count = int(self._slower[slowest]) + 1 if slower and not resized else 0
        self._slower[:] = 0
        self._slower[slowest] = count
        if count < self.settings.lasting_rounds:
            return []
        per_sample = np.array([False, True, True, False])
        rest = np.delete(judged.times, slowest, axis=0)
        sizes = np.maximum(np.delete(judged.sizes, slowest), 1.0)
        usual = np.median(np.where(per_sample, rest / sizes[:, None] * judged.sizes[slowest], rest), axis=0)
        phase = PHASES[int(np.argmax(judged.times[slowest] - usual))]
        return [self._begin(judged, slowest, phase, len(judged.rows), waits, waits, lasting=True)]

    def _judge_link(self, judged: RoundTimes) -> list[Straggler]:
        """Judge the all-reduces: they do not depend on the split, what they add to the step does."""
        settings, past, events = self.settings, self._link, []
        one = self.active.get(LINK)
        usual = past.expected[0] if past.tried[0] else judged.sync
        cost = float(judged.asks.max() - judged.asked(*usual).max())
        beyond = float(judged.sync.sum() - usual.sum())
        error = float(np.hypot(judged.sync_error, past.spread[0] ** 0.5 * usual.sum()))
        if one is not None:
            one.update(max(cost, 0.0))
            if beyond < settings.ended * one.excess:
                one.end("recovered")
                one.update(0.0)
                del self.active[LINK]
                events.append(one)
        elif beyond > settings.deviations * error and cost > settings.min_cost * judged.step:
            events.append(self._begin(judged, LINK, "link", len(judged.rows), cost, beyond))
        usual_now = np.array([LINK not in self.active])
        past.learn(judged.sync[None], usual_now, np.array([beyond > self._suspicious * judged.step]))
        return events


def _slow(judged: RoundTimes, rank: int) -> tuple[float, float]:
    return float(judged.sizes[rank]), float(judged.compute[rank])


def _smaller_share(judged: RoundTimes, rank: int, one: Straggler) -> bool:
    """Return whether the smaller share of a worker explains that it takes less time than when it was slow.

    A share alone saves no more time than in proportion. A worker that saves far more has recovered.
    """
    (size, seconds), (now, compute) = one.slow, _slow(judged, rank)
    return now < size and compute >= EXPLAINED * seconds * now / size
