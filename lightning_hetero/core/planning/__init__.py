"""Planning of the split: the workers' times, the all-reduce's, the optimal split, and the rule that changes to it."""

from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.planning.worker_times import WorkerTimes

__all__ = ["PerfModelPlanner", "WorkerTimes"]
