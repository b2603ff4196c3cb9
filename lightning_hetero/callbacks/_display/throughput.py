"""Samples of the mean worker for Lightning's ``ThroughputMonitor``, which multiplies them by the number of ranks."""

import logging
from collections.abc import Callable
from typing import Any

from lightning_hetero.callbacks._lightning import Trainer, callbacks_of, is_named
from lightning_hetero.engine import HeteroEngine

__all__ = ["count_all_workers", "count_own"]

log = logging.getLogger("lightning_hetero")


class _Mean:
    """Count of the mean worker in a training step; times the number of ranks, it is that of all workers.

    Args:
        count: counts what the user measures in a batch, samples or their length.
        samples: counts the samples of a batch.
        trainer: trainer that runs the step.
        engine: knows the samples of all ranks in the step.
    """

    def __init__(
        self, count: Callable[[Any], float], samples: Callable[[Any], float], trainer: Trainer, engine: HeteroEngine
    ) -> None:
        self.count, self.samples, self.trainer, self.engine = count, samples, trainer, engine

    def __call__(self, batch: Any) -> float:
        """Return the count of a batch; in a training step, that of the mean worker."""
        own, sampler = self.count(batch), self.engine.sampler
        if sampler is None or not self.trainer.training:
            return own
        total = sum(sampler.sizes_at(self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))
        return own * total / (self.engine.world_size * max(self.samples(batch), 1))


def count_all_workers(trainer: Trainer, engine: HeteroEngine) -> None:
    """Let the throughput monitors of a trainer count the samples of all workers, and say so once."""
    count_own(trainer)
    monitors = _monitors(trainer)
    if not monitors or engine.world_size == 1:
        return
    for monitor in monitors:
        samples = monitor.batch_size_fn
        if monitor.length_fn is not None:
            monitor.length_fn = _Mean(monitor.length_fn, samples, trainer, engine)
        monitor.batch_size_fn = _Mean(samples, samples, trainer, engine)
    if engine.rank == 0:
        log.info(
            "ThroughputMonitor takes rank 0 for all workers: with unequal batches, it is given the samples of the mean "
            "worker, so that rates of all workers together are right and device/... is the mean of their rates."
        )


def count_own(trainer: Trainer) -> None:
    """Give the monitors their own counters back."""
    for monitor in _monitors(trainer):
        if isinstance(monitor.batch_size_fn, _Mean):
            monitor.batch_size_fn = monitor.batch_size_fn.count
        if isinstance(monitor.length_fn, _Mean):
            monitor.length_fn = monitor.length_fn.count


def _monitors(trainer: Trainer) -> list[Any]:
    return [callback for callback in callbacks_of(trainer) if is_named(callback, "ThroughputMonitor")]
