"""Gradient norms under the heterogeneous strategy, from the engine's gradient hook."""

from typing import Any

from lightning_hetero.callbacks._gns.base import WorkersSource
from lightning_hetero.engine import HeteroEngine

__all__ = ["EngineSource"]


class EngineSource(WorkersSource):
    """Workers of ``hetero_ddp``: the engine collects and exchanges by itself."""

    def __init__(self, engine: HeteroEngine, **settings: Any) -> None:
        summed = engine.config.loss_reduction == "sum"
        super().__init__(engine.hook_state, engine.control, summed=summed, **settings)
        engine.measure_noise(self.collector)
