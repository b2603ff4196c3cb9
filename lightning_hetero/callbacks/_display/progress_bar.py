"""Current split and number of batches in Lightning's progress bar."""

import math
from typing import Any

from lightning_hetero.callbacks._lightning import LightningModule, Trainer
from lightning_hetero.engine import HeteroEngine

__all__ = ["SplitInBar", "lengthen_bar"]


class SplitInBar:
    """Split of the running step, shown among the metrics of the trainer's progress bar, if there is a bar.

    Args:
        trainer: trainer with the bar.
        engine: engine with the split.
    """

    def __init__(self, trainer: Trainer, engine: HeteroEngine) -> None:
        bar: Any = trainer.progress_bar_callback
        self._bar = None if trainer.world_size == 1 else bar
        if self._bar is None:
            return
        original = bar.get_metrics

        def get_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            metrics: dict[str, Any] = original(trainer, pl_module)
            if engine.plan is not None:
                metrics["split"] = "/".join(map(str, engine.plan.local_batch_sizes))
            return metrics

        bar.get_metrics = get_metrics

    def remove(self) -> None:
        """Give the bar its own metrics back."""
        if self._bar is not None:
            del self._bar.get_metrics


def lengthen_bar(trainer: Trainer) -> None:
    """Show the current number of batches in the bar, if there is one: on rank 0, once a resumed epoch has started."""
    bar: Any = trainer.progress_bar_callback
    if bar is None or not bar.is_enabled or getattr(bar, "train_progress_bar_id", 0) is None:
        return
    shown = getattr(bar, "train_progress_bar", None)  # of tqdm or a task of rich; other bars follow by themselves
    if shown is not None and not math.isinf(trainer.fit_loop.max_batches):  # of a stream no length is shown
        shown.total = trainer.fit_loop.max_batches
