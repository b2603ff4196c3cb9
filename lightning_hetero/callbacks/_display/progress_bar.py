"""Current split and number of batches in Lightning's progress bar."""

import math
from collections.abc import Sequence
from typing import Any

from lightning_hetero.callbacks._lightning import LightningModule, Trainer
from lightning_hetero.core.report.analysis import even_of
from lightning_hetero.core.report.records import RoundRecord
from lightning_hetero.engine import HeteroEngine

__all__ = ["SplitInBar", "lengthen_bar"]


SHOWN = 8
"""Most workers whose samples the bar shows."""


def split_text(sizes: Sequence[int]) -> str:
    """Return the samples of each worker, or their range if there are many.

    Example:
        >>> split_text((24, 12, 16)), split_text(range(1, 101))
        ('24/12/16', '1..100 x100')
    """
    if len(sizes) <= SHOWN:
        return "/".join(map(str, sizes))
    return f"{min(sizes)}..{max(sizes)} x{len(sizes)}"


def gained_text(newest: RoundRecord | None) -> dict[str, str]:
    """Return the idle share of the newest sync round, and the speed over even sizes, as far as they are known."""
    if newest is None or not newest.timed or not newest.step_time > 0:
        return {}
    busy = [sum(phases) for phases in zip(newest.data, newest.forward, newest.backward, newest.optimizer, strict=True)]
    idle = 1.0 - newest.accumulation * sum(busy) / len(busy) / newest.step_time
    shown = {"idle": f"{100 * min(max(idle, 0.0), 1.0):.0f}%"}
    even = even_of(newest)
    if math.isfinite(even):
        shown["vs even"] = f"{even / newest.step_time:.2f}x"
    return shown


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
                metrics["split"] = split_text(engine.plan.local_batch_sizes)
            metrics |= gained_text(engine.rounds.watch.newest)
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
