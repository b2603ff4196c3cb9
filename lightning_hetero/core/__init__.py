"""The mathematics of the package: numpy and plain Python values in, values out; no process group, clock or logger."""

from lightning_hetero.core.as_published import bootstrap_sizes
from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times, static_sizes
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

__all__ = [
    "BatchPlan",
    "ClusterTimeModel",
    "NodeTimeModel",
    "PlanEntry",
    "PlanHistory",
    "StepObservations",
    "bootstrap_sizes",
    "solve_optperf",
    "solve_step_times",
    "static_sizes",
]
