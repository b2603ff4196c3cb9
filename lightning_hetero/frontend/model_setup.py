"""Setup of a model for unequal batches, which every adapter does around DDP's wrapping of it."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.engine import HeteroEngine

__all__ = ["attach_module", "has_batch_norm", "loss_scaler", "raise_minimum"]


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Return whether a model has batch normalization, which fails for a batch of one sample.

    Example:
        >>> has_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm1d(3))), has_batch_norm(torch.nn.Linear(3, 1))
        (True, False)
    """
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def raise_minimum(engine: HeteroEngine, model: torch.nn.Module) -> bool:
    """Give every rank at least two samples if the model has batch normalization, unless the user gave a minimum.

    Returns:
        Whether the minimum has changed; data that was sharded before then has to be sharded again.
    """
    if engine.config.min_local_batch_size is not None or engine.data.min_local >= 2 or not has_batch_norm(model):
        return False
    engine.data.require_samples(2)
    return True


def loss_scaler(precision: object) -> torch.amp.GradScaler | None:
    """Return the loss scaler of a framework's precision plugin or accelerator, ``None`` without one."""
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler


def attach_module(engine: HeteroEngine, model: DistributedDataParallel, scaler: torch.amp.GradScaler | None) -> None:
    """Watch losses and weights of a module, and set up compression if the settings ask for it; a collective call.

    Args:
        engine: engine of the run.
        model: the module in DDP's wrapper; its names are the keys of the residuals.
        scaler: loss scaler of the run, ``None`` without one.
    """
    engine.health.attach(model.module, scaled=scaler is not None)
    engine.weighting.see_model(model.module)
    if engine.compression is not None:
        engine.compression.attach(
            model.module,
            grad_scale=None if scaler is None else scaler.get_scale,
            hold_unused=bool(model.find_unused_parameters),
        )
