"""Measured gain of each change of the split: the median step before against the median step after."""

import math
from dataclasses import dataclass, field

import numpy as np

from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.rounded import rounded

__all__ = ["MIN_STEPS", "Gain", "GainMeter"]

MIN_STEPS = 3
"""Fewest timed steps that give a median."""


@dataclass(frozen=True)
class Gain:
    """Seconds of a step before and after a change.

    Args:
        entry: the plan that was adopted.
        before: median seconds before.
        after: median seconds after.

    Example:
        >>> from lightning_hetero.core import BatchPlan
        >>> Gain(PlanEntry(0, 9, BatchPlan(8, (6, 2), step_time=0.25), "optimum"), 0.3, 0.24).describe()
        'epoch 0 step 9: step 300 -> 240 ms measured (predicted 250 ms)'
    """

    entry: PlanEntry
    before: float
    after: float

    @property
    def predicted(self) -> float:
        """Seconds that were predicted, NaN without a prediction."""
        return math.nan if self.entry.plan.step_time is None else float(self.entry.plan.step_time)

    def describe(self) -> str:
        """Return the line of the log."""
        predicted = "" if math.isnan(self.predicted) else f" (predicted {rounded(self.predicted * 1e3)} ms)"
        at = f"epoch {self.entry.epoch} step {self.entry.step}"
        return f"{at}: step {rounded(self.before * 1e3)} -> {rounded(self.after * 1e3)} ms measured{predicted}"


@dataclass
class GainMeter:
    """Waits for steps under a new plan and compares them with those under the one before.

    Attributes:
        before: median seconds of a step by split, of the newest round that had it.
        waiting: the change whose steps are awaited, and the split before it.
    """

    before: dict[tuple[int, ...], float] = field(default_factory=dict)
    waiting: tuple[PlanEntry, tuple[int, ...]] | None = None

    def observe(self, observations: StepObservations) -> Gain | None:
        """Take in the steps since the last sync round; return the gain of a change if they have measured it."""
        found = None
        for sizes, own in observations.splits():
            times = observations.step_time[own]
            times = times[np.isfinite(times).all(axis=1)]
            if len(times) < MIN_STEPS:
                continue
            split, median = tuple(int(size) for size in sizes), float(np.median(times))
            self.before = {**self.before, split: median}
            if self.waiting is None or split != self.waiting[0].plan.local_batch_sizes:
                continue
            entry, old = self.waiting
            self.waiting = None
            if old in self.before and sum(old) == sum(split):
                found = Gain(entry, self.before[old], median)
            self.before = {split: median}
        return found

    def changed(self, entry: PlanEntry, old: tuple[int, ...]) -> None:
        """Wait for the steps of a plan; one that replaces a plan not measured yet is compared with the same past."""
        self.waiting = entry, (old if self.waiting is None else self.waiting[1])
