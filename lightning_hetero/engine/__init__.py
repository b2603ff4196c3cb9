"""Engine of heterogeneous data parallelism, independent of any trainer."""

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.engine.engine import HeteroEngine

__all__ = ["HeteroEngine", "RoundResult"]
