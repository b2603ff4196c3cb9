"""Choice of the source of gradient norms, by the strategy that runs the training."""

from typing import Any

from lightning_hetero.callbacks._gns.base import Source
from lightning_hetero.callbacks._gns.hetero_ddp import EngineSource
from lightning_hetero.callbacks._gns.plain_ddp import PlainDDPSource
from lightning_hetero.callbacks._gns.single_worker import SingleWorkerSource
from lightning_hetero.callbacks._lightning import MisconfigurationException, Trainer, engine_if_any, is_named

__all__ = ["source_of"]


def source_of(trainer: Trainer, *, method: str, every_n_steps: int, horizon: float) -> Source:
    """Return the source of this trainer's gradients.

    Raises:
        MisconfigurationException: if the strategy shards the model or gives no access to its gradients.
    """
    settings: dict[str, Any] = {"every_n_steps": every_n_steps, "horizon": horizon}
    engine = engine_if_any(trainer)
    if trainer.world_size == 1:
        return SingleWorkerSource(**settings)
    if engine is not None:
        return EngineSource(engine, method=method, **settings)
    if is_named(trainer.strategy, "DDPStrategy"):
        return PlainDDPSource(trainer.global_rank, trainer.world_size, method=method, **settings)
    raise MisconfigurationException(
        f"GNSCallback reads gradients from DDP's communication hook; {type(trainer.strategy).__name__} has "
        "none. Use strategy='hetero_ddp' or 'ddp'."
    )
