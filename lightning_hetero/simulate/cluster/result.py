"""Result of a simulation: what every step took, beside its optimum, and what was decided."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.validation import check_int

__all__ = ["Recorder", "RoundRecord", "SimulationResult", "Stretch"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RoundRecord:
    """Sync round of a simulation.

    Args:
        step: steps that had run.
        predicted: predicted seconds of a step of the running plan, ``None`` without a model.
        error: standard error of that, ``None`` if it is not known.
        kept: why the plan stayed, ``None`` if it changed or there was nothing to say.
        following: step of the next round.
        seconds: that the round took.
        decision_seconds: processor time of the decision, in seconds of this machine.
    """

    step: int
    predicted: float | None
    error: float | None
    kept: str | None
    following: int
    seconds: float
    decision_seconds: float


@dataclass(frozen=True)
class Stretch:
    """Steps that ran at one split.

    Args:
        names: workers that took part.
        sizes: samples of each of them.
        seconds: of each step.
        exact: seconds of each step without jitter.
        optimum: least seconds of each step without jitter, over all splits.
        clock: when each step ended.
        idle: share of each step for which each worker computed nothing, shape ``(steps, workers)``.
        density: share of the gradient that was sent.
        stale: whether it was applied one step late.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: Array
    exact: Array
    optimum: Array
    clock: Array
    idle: npt.NDArray[np.float32]
    density: float = 1.0
    stale: bool = False


@dataclass(frozen=True)
class SimulationResult:
    """Steps and decisions of a simulation, from its beginning.

    Args:
        names: workers that ever took part; columns of :attr:`sizes` and :attr:`idle`.
        seconds: of each step.
        exact: seconds of each step without jitter, at the link's rate of the step's beginning.
        optimum: least of these seconds over all integer splits of the same total.
        clock: second of the virtual clock at which each step ended; a sync round is before the step that follows it.
        totals: samples of each step.
        samples: samples up to the end of each step.
        plans: plans, each from the step that it names on, with reason and predicted seconds.
        rounds: sync rounds.
        stretches: steps between two changes.

    Example:
        >>> from lightning_hetero.simulate import ClusterSimulator, DeviceProfile
        >>> devices = [DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.003, 0, 0.006, 0)]
        >>> result = ClusterSimulator(devices, 40).run(30)
        >>> result.plans[-1].plan.local_batch_sizes, round(result.share_of_optimum, 2), result.first_within(0.01)
        ((30, 10), 0.81, 15)
    """

    names: tuple[str, ...]
    seconds: Array
    exact: Array
    optimum: Array
    clock: Array
    totals: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    plans: tuple[PlanEntry, ...]
    rounds: tuple[RoundRecord, ...]
    stretches: tuple[Stretch, ...] = field(repr=False)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.seconds)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Samples of each step and worker, 0 while it did not take part."""
        return self._by_worker([np.broadcast_to(s.sizes, (len(s.seconds), len(s.sizes))) for s in self.stretches], 0)

    @property
    def idle(self) -> npt.NDArray[np.float32]:
        """Share of each step for which each worker computed nothing; NaN while it did not take part."""
        return self._by_worker([s.idle for s in self.stretches], np.float32(np.nan))

    @property
    def densities(self) -> Array:
        """Share of the gradient that each step sent."""
        return self._by_step([stretch.density for stretch in self.stretches])

    @property
    def stale(self) -> npt.NDArray[np.bool_]:
        """True for each step whose gradients were applied one step late."""
        return self._by_step([stretch.stale for stretch in self.stretches])

    def _by_step(self, values: list[Any]) -> Any:
        return np.repeat(values, [len(stretch.seconds) for stretch in self.stretches])

    def _by_worker(self, parts: list[Any], absent: Any) -> Any:
        found = np.full((self.steps, len(self.names)), absent)
        columns, first = {name: i for i, name in enumerate(self.names)}, 0
        for stretch, part in zip(self.stretches, parts, strict=True):
            rows = slice(first, first + len(stretch.seconds))
            if stretch.names == self.names:
                found[rows] = part
            else:
                found[rows, [columns[name] for name in stretch.names]] = part
            first = rows.stop
        return found

    @property
    def idle_share(self) -> Array:
        """Share of its time for which each worker computed nothing, over all steps in which it took part."""
        waited, took = np.zeros(len(self.names)), np.zeros(len(self.names))
        columns = {name: i for i, name in enumerate(self.names)}
        for stretch in self.stretches:
            own = [columns[name] for name in stretch.names]
            waited[own] += stretch.seconds @ stretch.idle
            took[own] += stretch.seconds.sum()
        with np.errstate(invalid="ignore"):
            return np.asarray(waited / took)

    @property
    def share_of_optimum(self) -> float:
        """Least time of all steps over the time that their splits take, both without jitter."""
        return self.share_since(0)

    def share_since(self, step: int) -> float:
        """Return :attr:`share_of_optimum` of the steps from one of them on.

        Raises:
            ValueError: if there is no such step.
        """
        check_int("step", step, minimum=0)
        if step >= self.steps:
            raise ValueError(f"step={step} is none of the {self.steps} simulated steps; run more of them first.")
        best, took = float(self.optimum[step:].sum()), float(self.exact[step:].sum())
        return best / took if took > 0 else 1.0  # devices that take no time lose none

    def first_within(self, share: float, *, since: int = 0, for_good: bool = False) -> float:
        """Return the steps until no more than a share of the least step time is lost; infinite if it never is.

        Args:
            share: of the optimum's time, ``>= 0``.
            since: step from which on they are counted.
            for_good: until it stays so.
        """
        outside = self.exact[since:] > self.optimum[since:] * (1.0 + share)
        if for_good:
            late = np.flatnonzero(outside)
            steps = int(late[-1]) + 1 if len(late) else 0
            return steps if steps < len(outside) else inf
        inside = np.flatnonzero(~outside)
        return int(inside[0]) if len(inside) else inf


class Recorder:
    """Collector of what happens in a simulation."""

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._plans: list[PlanEntry] = []
        self._rounds: list[RoundRecord] = []

    def add(self, part: Stretch | PlanEntry | RoundRecord) -> None:
        """Note what happened next."""
        kinds: dict[type[Any], list[Any]] = {
            Stretch: self._stretches,
            PlanEntry: self._plans,
            RoundRecord: self._rounds,
        }
        kinds[type(part)].append(part)

    def result(self) -> SimulationResult:
        """Return all of it."""
        parts = self._stretches
        names = tuple(dict.fromkeys(name for part in {p.names: p for p in parts}.values() for name in part.names))
        columns = {
            name: np.concatenate([np.zeros(0), *(getattr(part, name) for part in parts)])
            for name in ("seconds", "exact", "optimum", "clock")
        }
        lengths = [len(part.seconds) for part in parts]
        totals = np.repeat(np.array([sum(part.sizes) for part in parts], dtype=np.int64), lengths)
        return SimulationResult(
            names, **columns, totals=totals, samples=np.cumsum(totals), plans=tuple(self._plans),
            rounds=tuple(self._rounds), stretches=tuple(parts),
        )  # fmt: skip
