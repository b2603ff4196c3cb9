"""What callbacks take of Lightning, from whichever of its two packages is installed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.utilities.exceptions import MisconfigurationException
    except ImportError:  # only the standalone package is installed
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.utilities.exceptions import MisconfigurationException

__all__ = ["Callback", "LightningModule", "MisconfigurationException", "Trainer", "callbacks_of", "log_metrics"]


def callbacks_of(trainer: Any) -> list[Callback]:
    """Return the callbacks of a trainer, the list itself; Lightning's class does not declare it."""
    every: list[Callback] = trainer.callbacks
    return every


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log metrics with the number of optimizer steps so far, as Lightning logs those of a module."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
