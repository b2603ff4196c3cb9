"""Lightning's ``ThroughputMonitor`` where batches are unequal: it multiplies what rank 0 has by the number of ranks."""

import logging
from collections.abc import Callable
from typing import Any

from lightning_hetero.engine import HeteroEngine

__all__ = ["count_all_workers", "count_own"]

log = logging.getLogger("lightning_hetero")


class _Mean:
    """Counts what a worker has on average in a training step, of which the number of ranks times is the whole.

    Args:
        count: what the user counts in a batch, samples or their length.
        samples: counts the samples of a batch.
        trainer: whose step it is.
        engine: knows the samples of all ranks in it.
    """

    def __init__(
        self, count: Callable[[Any], float], samples: Callable[[Any], float], trainer: Any, engine: HeteroEngine
    ) -> None:
        self.count, self.samples, self.trainer, self.engine = count, samples, trainer, engine

    def __call__(self, batch: Any) -> float:
        """What there is in a batch; in a training step, of the mean worker."""
        own, sampler = self.count(batch), self.engine.sampler
        if sampler is None or not self.trainer.training:
            return own
        total = sum(sampler.sizes_at(self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))
        return own * total / (self.engine.world_size * max(self.samples(batch), 1))


def count_all_workers(trainer: Any, engine: HeteroEngine) -> None:
    """Let the throughput monitors of a trainer count the samples of all workers, and say so once."""
    count_own(trainer)
    monitors = [callback for callback in trainer.callbacks if _monitors(callback)]
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


def count_own(trainer: Any) -> None:
    """Give the monitors back what they counted before."""
    for monitor in filter(_monitors, trainer.callbacks):
        for name in ("batch_size_fn", "length_fn"):
            counted = getattr(monitor, name)
            if isinstance(counted, _Mean):
                setattr(monitor, name, counted.count)


def _monitors(callback: Any) -> bool:
    return any(cls.__name__ == "ThroughputMonitor" for cls in type(callback).__mro__)
