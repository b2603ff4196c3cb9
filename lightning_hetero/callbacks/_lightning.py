"""Lightning's names that callbacks use, from whichever of its two packages is installed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.report.folder import logger_folder as folder_of

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

__all__ = [
    "Callback",
    "LightningModule",
    "MisconfigurationException",
    "Trainer",
    "callbacks_of",
    "engine_if_any",
    "is_named",
    "log_metrics",
    "logger_folder",
    "processed",
    "replace_callbacks",
]


def callbacks_of(trainer: Any) -> list[Callback]:
    """Return the callbacks of a trainer, the list itself; Lightning's class does not declare it."""
    every: list[Callback] = trainer.callbacks
    return every


def engine_if_any(trainer: Trainer) -> HeteroEngine | None:
    """Return the engine of a trainer's strategy, ``None`` if the strategy has none or one of another kind."""
    engine = getattr(trainer.strategy, "engine", None)
    return engine if isinstance(engine, HeteroEngine) else None


def replace_callbacks(trainer: Any, callbacks: list[Callback]) -> None:
    """Give a trainer another list of callbacks; loops over the old list are not disturbed."""
    trainer.callbacks = callbacks


def is_named(plugin: object, name: str) -> bool:
    """Return whether an object is of a Lightning class of that name, from either of Lightning's two packages.

    Example:
        >>> is_named(Callback(), "Callback"), is_named(Callback(), "Timer")
        (True, False)
    """
    return any(cls.__name__ == name for cls in type(plugin).__mro__)


def processed(progress: Any) -> int:
    """Return how many batches, or epochs, one of Lightning's progress objects has counted in the running loop."""
    return int(progress.current.processed)


def log_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log metrics as Lightning logs those of a module: with the optimizer steps so far, the epoch, and for callbacks.

    ``trainer.callback_metrics`` has them on every rank, so that ``ModelCheckpoint`` and ``EarlyStopping`` can monitor
    them.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logged = {**metrics, "epoch": float(trainer.current_epoch)}
        logger.log_metrics(logged, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def logger_folder(trainer: Trainer) -> Path | None:
    """Return the folder of a trainer's first logger on rank 0, ``None`` elsewhere and without one.

    ``trainer.log_dir`` is a collective call, which hangs where only rank 0 was given a logger.
    """
    return folder_of(trainer.loggers) if trainer.is_global_zero else None
