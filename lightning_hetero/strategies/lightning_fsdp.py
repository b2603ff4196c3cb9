"""``hetero_fsdp`` for ``lightning.pytorch``."""

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry

from lightning_hetero.strategies._lightning.fsdp.strategy import HeteroFSDPMixin
from lightning_hetero.strategies._registration import register

__all__ = ["HeteroFSDPStrategy"]


class HeteroFSDPStrategy(HeteroFSDPMixin, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2) for unequal workers; arguments: :class:`HeteroFSDPMixin`."""


register(HeteroFSDPStrategy, StrategyRegistry)
