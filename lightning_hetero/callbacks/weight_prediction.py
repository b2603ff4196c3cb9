"""Weight prediction for stale gradients, as a Lightning callback."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from lightning_hetero.callbacks._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    callbacks_of,
)
from lightning_hetero.callbacks.base import engine_of
from lightning_hetero.compression.layout import flat_view
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.optim.weight_prediction import expected_move, foresees

__all__ = ["LookAheadCallback"]

log = logging.getLogger("lightning_hetero")


@checked_keywords
class LookAheadCallback(Callback):
    """Weight prediction: stale gradients are computed at the weights to which they will be applied.

    With ``staleness=1`` the optimizer steps once between computing a gradient and applying it. With momentum, this
    raises the loss considerably early in training. The callback therefore runs forward and backward at the weights that
    it expects after that step. It predicts the step from momentum and, in place of the sum in flight, from this
    worker's own part of it, divided by its share of the batch. Before the optimizer steps, it restores the weights
    exactly, so replicas stay identical. It leaves steps without stale gradients alone.

    It needs a copy of the weights whose gradients are stale, and reads and writes them twice per step; with sparse
    steps, the touched blocks only. It predicts the next step of SGD, Adam and AdamW. With other optimizers, and with
    ``staleness=0``, it says so and does nothing. :class:`~lightning_hetero.TTACallback` adds one by itself.

    Args:
        gain: returns the factor on the scheduled learning rate in the running step; ``None`` for 1.

    Raises:
        TypeError: if ``gain`` is no function.

    Example:
        >>> from lightning_hetero import HeteroDDPStrategy
        >>> strategy, callbacks = HeteroDDPStrategy(staleness=1), [LookAheadCallback()]
    """

    def __init__(self, gain: Callable[[], float] | None = None) -> None:
        if gain is not None and not callable(gain):
            raise TypeError(f"gain={gain!r} is not callable; give a function that returns the factor, or None for 1.")
        self._gain = gain
        self._engine: HeteroEngine | None = None
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        self._copies: dict[torch.Tensor, torch.Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the engine of the strategy.

        Raises:
            MisconfigurationException: if the trainer runs with another strategy, or has several of these callbacks.
        """
        needs = "LookAheadCallback needs a strategy whose gradients can be stale"
        self._engine = engine_of(trainer, needs, "HeteroDDPStrategy(staleness=1)")
        count = sum(isinstance(callback, LookAheadCallback) for callback in callbacks_of(trainer))
        if count > 1:
            raise MisconfigurationException(
                f"{count} of LookAheadCallback would both move the weights and put them back. Keep one of them."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the strategy keep this worker's own part of stale sums."""
        assert self._engine is not None
        stale = self._engine.hook_state.staleness
        strange = [type(optimizer).__name__ for optimizer in trainer.optimizers if not foresees(optimizer)]
        if stale is None or stale.limit == 0 or strange:
            if stale is not None and stale.limit and self._engine.rank == 0:
                log.info("weight prediction supports SGD, Adam and AdamW only; %s runs without it", strange[0])
            self._engine = None
            return
        stale.keep_own()
        self._engine.restore_weights_by(self._back)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Move the weights to where this step's stale gradients will be applied."""
        self._back()
        if self._engine is None or self._engine.hook_state.staleness is None or self._engine.plan is None:
            return
        stale, plan, topology = self._engine.hook_state.staleness, self._engine.plan, self._engine.hook_state.topology
        members = (self._engine.rank,) if topology is None else topology.members_of(self._engine.rank)
        expected = stale.predicted_sums([plan.shares[rank] for rank in members], plan.shares[self._engine.rank])
        if expected is None:
            return
        factor = self._clip(trainer, expected)
        with torch.no_grad():
            for optimizer in trainer.optimizers:
                self._move(optimizer, expected, factor)

    def _clip(self, trainer: Trainer, expected: dict[torch.Tensor, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that clips the expected gradient as the trainer will."""
        value = trainer.gradient_clip_val
        if not value:
            return lambda gradient: gradient
        if getattr(trainer, "gradient_clip_algorithm", None) == "value":
            return lambda gradient: gradient.clamp(-value, value)
        norms = [values.norm() for _, values in expected.values() if values is not None]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return lambda gradient: gradient * min(1.0, value / max(norm, 1e-12))

    def _move(
        self,
        optimizer: torch.optim.Optimizer,
        expected: dict[torch.Tensor, Any],
        clip: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        assert self._engine is not None
        compression = self._engine.compression
        steps = None if compression is None else compression.steps_of(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                places, values = expected.get(parameter, (None, None))
                if parameter not in expected or (steps is not None and values is None):
                    continue
                state = {
                    name: flat_view(value) if value.shape == parameter.shape and name != "step" else value
                    for name, value in optimizer.state.get(parameter, {}).items()
                    if isinstance(value, torch.Tensor)
                }
                gradient = None if values is None else clip(values).to(parameter.dtype)
                if steps is None and places is not None and gradient is not None:
                    whole = torch.zeros_like(flat_view(parameter.data))
                    gradient, places = whole.index_copy_(0, places, gradient), None
                if places is not None:
                    state = {name: v[places] if v.shape == (parameter.numel(),) else v for name, v in state.items()}
                kept = None if steps is None else steps.kept(group, parameter, places)
                move = expected_move(optimizer, group, state, gradient, kept=kept)
                if move is not None:
                    self._shift(parameter, places, move if self._gain is None else move.mul_(self._gain()))

    def _shift(self, parameter: torch.Tensor, places: torch.Tensor | None, move: torch.Tensor) -> None:
        """Move elements of a parameter, and keep their old values."""
        flat = flat_view(parameter.data)
        if places is None:
            copy = self._copies.get(parameter)
            if copy is None:
                copy = self._copies[parameter] = torch.empty_like(flat)
            self._kept.append((parameter, None, copy.copy_(flat)))
            flat.sub_(move)
        else:
            before = flat[places]
            self._kept.append((parameter, places, before))
            flat.index_copy_(0, places, before - move)

    def _back(self) -> None:
        """Restore the old values exactly."""
        kept, self._kept = self._kept, []
        for parameter, places, before in kept:
            flat = flat_view(parameter.data)
            if places is None:
                flat.copy_(before)
            else:
                flat.index_copy_(0, places, before)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights for the optimizer, now that the gradient is computed."""
        self._back()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Restore the weights if there was no backward pass."""
        self._back()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights if the module has skipped the rest of the epoch."""
        self._back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights for a checkpoint that is saved now."""
        self._back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the weights, and free the copies."""
        self._back()
        if self._engine is not None:
            self._engine.restore_weights_by(None)
        self._copies.clear()
