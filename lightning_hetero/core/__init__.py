"""The mathematics of the package: numpy and plain Python values in, values out; no process group, clock or logger.

:data:`INDEX` says where each equation of the papers is, and which test holds it. Code cites papers by letter: C is
Cannikin, D dynamic batching, A Adaptive SGD, S StellaTrain, as in ``C eq. 9``.
"""

from lightning_hetero.core.as_published import bootstrap_sizes
from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times, static_sizes
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.paper_index import INDEX, PAPERS, PaperEntry
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel

__all__ = [
    "INDEX",
    "PAPERS",
    "BatchPlan",
    "ClusterTimeModel",
    "NodeTimeModel",
    "PaperEntry",
    "PlanEntry",
    "PlanHistory",
    "StepObservations",
    "bootstrap_sizes",
    "solve_optperf",
    "solve_step_times",
    "static_sizes",
]
