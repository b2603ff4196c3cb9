"""Sources of the gradient norms of :class:`~lightning_hetero.callbacks.GNSCallback`.

There are three: several workers of ``hetero_ddp`` (unequal batches), several workers of plain ``ddp`` (equal batches),
and a single worker (gradient accumulation or, flagged as biased, successive steps).
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from lightning_hetero.callbacks._lightning import Trainer
from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.frontend.model_setup import loss_scaler
from lightning_hetero.optim import AdamPreconditioner

__all__ = ["INTERVAL", "Source", "WorkersSource"]

log = logging.getLogger("lightning_hetero")


class Source:
    """A source of gradient norms, notified at the stages of a step; by default it does nothing there."""

    @property
    def running(self) -> RunningNoiseScale:
        """The running estimate."""
        raise NotImplementedError

    def take_over(self, running: RunningNoiseScale) -> None:
        """Continue from an estimate."""
        raise NotImplementedError

    def listen(self, news: Callable[[], None]) -> None:
        """Call ``news`` when workers have merged their estimates, if that is not at a stage of a step."""

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        """Take norms of gradients as Adam scales them."""

    def start(self, trainer: Trainer) -> None:
        """Begin with a training."""

    def begin(self, trainer: Trainer, batch_size: int) -> None:
        """Take note that a batch begins."""

    def backward(self, trainer: Trainer) -> None:
        """Take note that a backward pass is over."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that an optimizer is about to step."""

    def end(self, trainer: Trainer) -> None:
        """Take note that the batch is over."""

    def flush(self) -> None:
        """Add what only this rank has observed to the running estimate."""

    def finish(self) -> None:
        """End a training; one too short for a message gets its estimate now; a collective call."""

    def stop(self) -> None:
        """Leave nothing of the training running."""

    def interval(self) -> dict[str, Any]:
        """Return what was seen since the last message, for a checkpoint; a collective call."""
        return {}

    def resume(self, interval: dict[str, Any]) -> None:
        """Continue in the middle of an interval."""


class WorkersSource(WorkersNoise, Source):
    """Several workers that merge their sums."""

    def listen(self, news: Callable[[], None]) -> None:
        self.collector.on_update(news)

    def start(self, trainer: Trainer) -> None:
        self.scaled_by(loss_scaler(trainer.precision_plugin))
        module = trainer.lightning_module
        if module.automatic_optimization:
            self.collector.accumulate(lambda: trainer.accumulate_grad_batches, module.parameters)

    def finish(self) -> None:
        if self.running.samples == 0:
            self.exchange()

    def stop(self) -> None:
        self.collector.on_update(None)


INTERVAL = 50
"""Observed steps between two messages or readings of the device, where the engine does not set the interval."""
