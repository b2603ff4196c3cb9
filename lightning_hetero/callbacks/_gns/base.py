"""Where :class:`~lightning_hetero.callbacks.GNSCallback` gets its norms from, by what runs the training.

Three sources: several workers of ``hetero_ddp`` (unequal batches), several workers of plain ``ddp`` (equal ones), and a
single worker, by gradient accumulation or, flagged as biased, by successive steps.
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
    """Where gradients come from: what there is to do at the seams of a step, nothing by default."""

    running: RunningNoiseScale

    def listen(self, news: Callable[[], None]) -> None:
        """Tell when workers have put their estimates together, if that is not at a seam of a step."""

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        """Take norms of gradients as Adam scales them."""

    def start(self, trainer: Trainer) -> None:
        """Training begins."""

    def begin(self, trainer: Trainer, batch_size: int) -> None:
        """A batch begins."""

    def backward(self, trainer: Trainer) -> None:
        """A backward pass is over."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def end(self, trainer: Trainer) -> None:
        """The batch is over."""

    def flush(self) -> None:
        """Take what is known on this rank alone into the running estimate."""

    def finish(self) -> None:
        """Training went to its end: a training too short for a message has an estimate all the same; collective."""

    def stop(self) -> None:
        """Training is over."""

    def interval(self) -> dict[str, Any]:
        """What was seen since the last message, for a checkpoint; a collective call."""
        return {}

    def resume(self, interval: dict[str, Any]) -> None:
        """Go on in the middle of an interval."""


class WorkersSource(WorkersNoise, Source):
    """Several workers, who put their sums together."""

    def listen(self, news: Callable[[], None]) -> None:
        self.collector.news = news

    def start(self, trainer: Trainer) -> None:
        self.scaled_by(loss_scaler(trainer.precision_plugin))
        module = trainer.lightning_module
        if module.automatic_optimization:
            self.collector.accumulate(lambda: trainer.accumulate_grad_batches, module.parameters)

    def finish(self) -> None:
        if self.running.samples == 0:
            self.exchange()

    def stop(self) -> None:
        self.collector.news = lambda: None


INTERVAL = 50
"""Observed steps between two messages or readings of the device, where the engine does not set the pace."""
