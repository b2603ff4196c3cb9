"""``hetero_ddp`` for ``pytorch_lightning``."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_hetero.strategies._lightning.ddp import HeteroDDPMixin
from lightning_hetero.strategies._registration import register

__all__ = ["HeteroDDPStrategy"]


class HeteroDDPStrategy(HeteroDDPMixin, DDPStrategy):
    """Lightning's ``DDPStrategy`` for unequal workers; arguments: :class:`HeteroDDPMixin` and ``DDPStrategy``."""


register(HeteroDDPStrategy, StrategyRegistry)
