"""Outcome of a sync round, the same on all ranks."""

import math
from dataclasses import dataclass

from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Planner

__all__ = ["RoundResult"]


@dataclass(frozen=True)
class RoundResult:
    """Outcome of one sync round.

    Args:
        planner: the planner that has seen the observations (on rank 0; unchanged elsewhere).
        observations: what all ranks measured since the last sync round.
        entry: the plan that was adopted, ``None`` if the current one stays.
        predicted: predicted seconds of a step under the plan that ran, ``None`` without a model.
        error: standard error of ``predicted`` in seconds, ``None`` if unknown.
        density: whether the policy decided on the density of compressed gradients (on rank 0).
        even: predicted seconds of a step of equal sizes, NaN if unknown.
        kept: why the plan stays (on rank 0), ``None`` if it changes or there is nothing to say.
        rows: samples that each worker ran in a step since the last sync round, on average.

    Example:
        >>> from lightning_hetero.core import BatchPlan
        >>> done = RoundResult(None, StepObservations.empty(2), PlanEntry(0, 9, BatchPlan(8, (6, 2)), "by hand"), None)
        >>> done.entry.describe(), done.observations.num_steps
        ('6/2 of 8 samples (by hand)', 0)
    """

    planner: Planner | None
    observations: StepObservations
    entry: PlanEntry | None
    predicted: float | None
    error: float | None = None
    density: bool = False
    even: float = math.nan
    kept: str | None = None
    rows: tuple[float, ...] = ()
