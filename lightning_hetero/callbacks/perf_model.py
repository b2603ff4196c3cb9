"""The policy of the time model as a Lightning callback (Cannikin, sec. 3-4)."""

from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.core.policies.perf_model import PerfModelPlanner

__all__ = ["PerfModelCallback"]


class PerfModelCallback(PolicyCallback):
    """Learn a time model of every worker and give each the exact optimum (Cannikin, sec. 3-4).

    Starts with equal sizes, splits by measured speed after about eight steps (eq. 8), by the time model (OptPerf)
    once each worker was seen at two sizes, and follows when a worker's speed drifts. Installed by default.

    Example:
        >>> PerfModelCallback().policy
        'perf_model'
    """

    def __init__(self) -> None:
        super().__init__(PerfModelPlanner())
