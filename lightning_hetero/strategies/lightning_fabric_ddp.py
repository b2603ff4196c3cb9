"""``hetero_ddp`` for ``lightning_fabric``."""

from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_hetero.strategies._fabric.ddp import HeteroFabricMixin
from lightning_hetero.strategies._registration import register

__all__ = ["HeteroDDPStrategy"]


class HeteroDDPStrategy(HeteroFabricMixin, DDPStrategy):
    """Fabric's ``DDPStrategy`` for unequal workers; arguments: :class:`HeteroFabricMixin` and ``DDPStrategy``."""


register(HeteroDDPStrategy, STRATEGY_REGISTRY)
