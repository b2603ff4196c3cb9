"""``hetero_elastic`` for ``lightning.pytorch``."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_hetero.strategies._lightning.elastic.strategy import HeteroElasticMixin
from lightning_hetero.strategies._registration import register

__all__ = ["HeteroElasticStrategy"]


class HeteroElasticStrategy(HeteroElasticMixin, DDPStrategy):
    """Elastic averaging of replicas on unequal workers and irregular work; arguments: :class:`HeteroElasticMixin`."""


register(HeteroElasticStrategy, StrategyRegistry)
