"""``hetero_ddp`` under Ray Train: Ray starts and joins the workers; the strategy is Ray's own DDP with our split."""

import functools
from typing import Any

from lightning_hetero.strategies._lightning.ddp import HeteroDDPMixin

__all__ = ["ray_strategy"]


def ray_strategy(**settings: Any) -> HeteroDDPMixin:
    """Make the strategy for a ``Trainer`` inside the training function of Ray's ``TorchTrainer``.

    Use it with ``plugins=[RayLightningEnvironment()]`` and ``prepare_trainer``, as Ray's ``RayDDPStrategy``.

    Args:
        settings: arguments of ``HeteroDDPStrategy``.

    Returns:
        A ``RayDDPStrategy`` that splits batches by speed.

    Raises:
        ImportError: if Ray Train is not installed.
        TypeError: if a setting has the wrong type.
        ValueError: if a setting is out of range.
    """
    return _strategy_class()(**settings)


@functools.cache
def _strategy_class() -> type[HeteroDDPMixin]:
    try:
        from ray.train.lightning import RayDDPStrategy
    except ImportError as error:
        raise ImportError(
            f"ray_strategy() needs Ray Train ({error}). Install it with: pip install 'lightning-hetero[ray]'"
        ) from error

    class RayHeteroDDPStrategy(HeteroDDPMixin, RayDDPStrategy):
        """Ray's ``RayDDPStrategy`` for unequal workers."""

    return RayHeteroDDPStrategy
