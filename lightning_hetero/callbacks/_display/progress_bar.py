"""Current split, what it gains, and number of batches in Lightning's progress bar."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.callbacks._lightning import LightningModule, Trainer
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


def gained_text(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the idle share and the speed over even sizes as text, as far as they are known.

    Example:
        >>> gained_text({"hetero/idle_fraction": 0.042, "hetero/speed_up": 1.84})
        {'idle': '4%', 'vs even': '1.84x'}
    """
    idle, gain = metrics.get("hetero/idle_fraction"), metrics.get("hetero/speed_up")
    shown = {} if idle is None else {"idle": f"{100 * idle:.0f}%"}
    return shown if gain is None else {**shown, "vs even": f"{gain:.2f}x"}


class SplitInBar:
    """Split of the running step, shown among the metrics of the trainer's progress bar, if there is a bar.

    Args:
        trainer: trainer with the bar.
        engine: engine with the split.
    """

    def __init__(self, trainer: Trainer, engine: HeteroEngine) -> None:
        bar: Any = trainer.progress_bar_callback
        self._bar = None if trainer.world_size == 1 else bar
        self._gained: dict[str, str] = {}
        if self._bar is None:
            return
        original = bar.get_metrics

        def get_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            metrics: dict[str, Any] = original(trainer, pl_module)
            if engine.plan is not None:
                sizes = () if engine.sampler is None else engine.sampler.sizes_at(*engine.position)
                metrics["split"] = split_text(sizes or engine.plan.local_batch_sizes)
            return metrics | self._gained

        bar.get_metrics = get_metrics

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show what the metrics of a sync round say of the gain; what they do not know stays as it is."""
        self._gained |= gained_text(metrics)

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
