"""The policy of the time model as a Lightning callback (Cannikin, sec. 3-4)."""

from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.planning.planner import PerfModelPlanner

__all__ = ["PerfModelCallback"]


@checked_keywords
class PerfModelCallback(PolicyCallback):
    """Policy that learns a time model of every worker and splits at the exact optimum (Cannikin, sec. 3-4).

    It starts with equal sizes, splits by measured speed after about six steps (eq. 8), and by the time model
    (OptPerf) once each worker was seen at two sizes. It follows drifts of a worker's speed. Installed by default.

    Example:
        >>> PerfModelCallback().policy
        'perf_model'
    """

    def __init__(self) -> None:
        super().__init__(PerfModelPlanner())
