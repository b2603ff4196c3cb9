"""Stale gradients at the beginning and end of a training: check that it can have them, apply those in flight."""

import inspect
import logging

import torch

from lightning_hetero.callbacks._lightning import LightningModule, Trainer
from lightning_hetero.engine import HeteroEngine

__all__ = ["apply_last_sums", "check_staleness"]

log = logging.getLogger("lightning_hetero")


def check_staleness(trainer: Trainer, engine: HeteroEngine) -> str | None:
    """Return why this training cannot have stale gradients, ``None`` if it can or has none."""
    if engine.config.staleness == 0:
        return None
    if engine.sampler is None:
        return (
            "staleness=1 measures steps of a train loader that is split, and policy='even' left this one alone. Use a "
            "map-style dataset with a batch_size, or set staleness=0."
        )
    for optimizer in trainer.optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            return (
                f"staleness=1 gives one gradient a step, but {type(optimizer).__name__} computes several of them in "
                "one. Use another optimizer, or set staleness=0."
            )
    return None


def apply_last_sums(trainer: Trainer, pl_module: LightningModule, engine: HeteroEngine) -> None:
    """Make one more optimizer step with the sums still in flight, on their parameters only.

    The gradients are clipped as the module clips; neither the trainer nor a scheduler counts the step.
    """
    staleness = engine.hook_state.staleness
    sums = {} if staleness is None else staleness.drain()
    if not sums:
        return
    for name, parameter in pl_module.named_parameters():
        flat = sums.get(name)
        parameter.grad = None if flat is None else torch.as_strided(flat, parameter.size(), parameter.stride())
    for optimizer in trainer.optimizers:
        pl_module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        optimizer.step()
        optimizer.zero_grad()
    if engine.rank == 0:
        log.info("staleness: the gradients of the last step that were in flight (%d tensors) are applied", len(sums))
