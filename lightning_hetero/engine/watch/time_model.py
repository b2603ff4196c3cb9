"""Time model of a run for its record: that of the policy, or one that only watches where the policy has none."""

import math
from dataclasses import dataclass
from typing import Any

from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import PlanContext, Planner

__all__ = ["KnownTimes", "TimeModelWatch"]


@dataclass(frozen=True)
class KnownTimes:
    """Predictions and coefficients of the time model after a sync round.

    Args:
        even: predicted seconds of a step of equal sizes, NaN if unknown.
        model: coefficients of the model, as fields of a round's record.
        running: predicted seconds of a step of the running plan, if the policy predicts none itself; else NaN.
        error: standard error of ``running``.
    """

    even: float
    model: dict[str, Any]
    running: float = math.nan
    error: float = math.nan


class TimeModelWatch:
    """Time model of a run, on rank 0."""

    def __init__(self) -> None:
        self._watching = PerfModelPlanner()

    def observe(
        self, planner: Planner | None, observations: StepObservations, running: BatchPlan, context: PlanContext
    ) -> KnownTimes:
        """Return what is known after a sync round.

        Args:
            planner: planner that has seen the observations.
            observations: of all workers.
            running: plan under which they ran.
            context: conditions of the run.
        """
        inner = planner if isinstance(planner, PerfModelPlanner) else getattr(planner, "model", None)
        own = isinstance(inner, PerfModelPlanner)
        if not isinstance(inner, PerfModelPlanner):
            inner = self._watching = self._watching.observe(observations, context)
        if not inner.knows(context):
            return KnownTimes(math.nan, {})
        total = running.total_batch_size
        cluster, even = inner.cluster(context), even_sizes(total, len(context.identities))
        predicted = inner.predict(BatchPlan(total, even), context)
        model: dict[str, Any] = {}
        if cluster is not None:
            nodes = tuple(tuple(map(float, row)) for row in cluster.array)
            model = {
                "nodes": nodes,
                "gamma": float(cluster.gamma),
                "t_o": float(cluster.t_o),
                "t_u": float(cluster.t_u),
            }
        if own:
            return KnownTimes(_number(predicted), model)
        own_split = _number(inner.predict(running, context)), _number(inner.error(running, context))
        return KnownTimes(_number(predicted), model, *own_split)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
