"""Ends of batches, epochs and runs under elastic averaging, and the metrics of a merge."""

import logging
from typing import Any, Protocol

from lightning_hetero.callbacks._lightning import Callback, LightningModule, Trainer, log_metrics
from lightning_hetero.elastic import ElasticEngine, MergeRecord
from lightning_hetero.elastic.merging.run_summary import summary_of_merges
from lightning_hetero.frontend.report.finish import status_of

__all__ = ["ElasticCallback", "merge_metrics"]

log = logging.getLogger("lightning_hetero")


def merge_metrics(record: MergeRecord, batch_sizes: tuple[int, ...]) -> dict[str, float]:
    """Return the metrics of one mega-batch; ``hetero/idle_fraction`` is the share of time that ranks waited in it.

    Args:
        record: the merge at its end.
        batch_sizes: batch sizes of all ranks from now on.

    Example:
        >>> record = MergeRecord(0, 64, (8, 8), (6, 2), (48, 16), (0.75, 0.25), False, (1.0, 1.0))
        >>> metrics = merge_metrics(record, (8, 6))
        >>> metrics["hetero/updates/rank0"], metrics["hetero/local_batch_size/rank1"], metrics["hetero/idle_fraction"]
        (6.0, 6.0, 0.0)
    """
    busy = record.busy
    metrics = {
        "hetero/perturbed": float(record.perturbed),
        "hetero/idle_fraction": 1.0 - sum(busy) / len(busy) / max(*busy, 1e-9),
    }
    for rank, size in enumerate(batch_sizes):
        metrics[f"hetero/local_batch_size/rank{rank}"] = float(size)
        metrics[f"hetero/updates/rank{rank}"] = float(record.updates[rank])
        metrics[f"hetero/merge_weight/rank{rank}"] = record.weights[rank]
    return metrics


class ElasticStrategy(Protocol):
    """A strategy whose ranks train on batches that they claim, and merge."""

    engine: ElasticEngine

    def end_batch(self) -> MergeRecord | None:
        """Claim the next batch, or merge."""


def _strategy(trainer: Trainer) -> ElasticStrategy:
    strategy: Any = trainer.strategy
    found: ElasticStrategy = strategy
    return found


class ElasticCallback(Callback):
    """Callback that ``hetero_elastic`` puts before all others, which then see the merged model."""

    _newest: MergeRecord | None = None  # of the newest summary

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Claim the next batch, or merge."""
        strategy = _strategy(trainer)
        record = strategy.end_batch()
        if record is not None and trainer.world_size > 1:
            log_metrics(trainer, merge_metrics(record, strategy.engine.batch_sizes))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that this rank leaves the epoch together with the others, after a merge.

        Raises:
            RuntimeError: if it left the epoch inside a mega-batch.
        """
        _strategy(trainer).engine.require_merged("leaving an epoch (a skipped batch, trainer.should_stop)")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log on rank 0 what each worker did, and the speed over equal shares."""
        self._summarize(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Log the same of the merges before an exception, and the exception."""
        self._summarize(trainer, f"\nended early: {status_of(exception)}")

    def _summarize(self, trainer: Trainer, ending: str = "") -> None:
        """Log the summary, once for the same merges."""
        engine: ElasticEngine | None = getattr(trainer.strategy, "engine", None)
        if engine is None or trainer.world_size == 1 or not trainer.is_global_zero:
            return
        summary = summary_of_merges(engine.merges, engine.batch_sizes)
        if summary is not None and self._newest is not engine.merges[-1]:
            self._newest = engine.merges[-1]
            log.info("%s%s", summary.text(), ending)
