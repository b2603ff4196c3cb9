"""One batch of elastic averaging: what Lightning's loops do at all ranks alike follows the merges instead."""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.elastic import MergeRecord
from lightning_hetero.strategies._lightning.elastic.collectives import ElasticCollectivesMixin
from lightning_hetero.strategies._lightning.elastic.rates import scaled_rates

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.types import LRSchedulerConfig

__all__ = ["NEVER", "ElasticStepsMixin", "StepSchedules"]

NEVER = sys.maxsize


class StepSchedules:
    """Step schedules with ``interval="step"`` by what a synchronous run would have done with the same samples.

    Args:
        configs: of all schedules of the trainer; those of a step are taken out of Lightning's hands.
        done: steps that count as done.
    """

    def __init__(self, configs: "Iterable[LRSchedulerConfig]", done: int) -> None:
        self._schedules: list[tuple[Any, int]] = []
        self._done = done
        for config in configs:
            if config.interval == "step":
                self._schedules.append((config.scheduler, config.frequency))
                config.frequency = NEVER

    def step(self, done: int, per_epoch: int, module: "LightningModule") -> None:
        """Step the schedules that are due.

        Args:
            done: steps that a synchronous run would have done by now.
            per_epoch: steps of its epochs.
            module: steps a schedule.
        """
        for step in range(self._done + 1, done + 1):
            for scheduler, frequency in self._schedules:
                if ((step - 1) % per_epoch + 1) % frequency == 0:
                    module.lr_scheduler_step(scheduler, None)
        self._done = max(self._done, done)


class ElasticStepsMixin(ElasticCollectivesMixin):
    """Train on one batch after another, as far as this rank claims them."""

    _schedules: StepSchedules | None = None

    @property
    def _automatic(self) -> bool:
        return bool(self._pl_module.automatic_optimization)

    def _begin_schedules(self) -> None:
        """Take schedules of steps out of Lightning's hands.

        Raises:
            MisconfigurationException: if one of them needs a metric in each step.
        """
        assert self.engine is not None
        configs = self.lr_scheduler_configs if self._automatic else []
        if any(config.interval == "step" and config.reduce_on_plateau for config in configs):
            raise self._misconfiguration(
                "a ReduceLROnPlateau with interval='step' needs a metric of all ranks in every batch. Use "
                "interval='epoch'."
            )
        self._schedules = StepSchedules(configs, self.engine.steps_done())

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Begin to train on a batch, which is not the last of the epoch as far as is known now."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.engine is not None
        self.engine.begin_batch()
        self._set_last(False)
        self._trainer.val_check_batch = NEVER

    def _set_last(self, last: bool) -> None:
        """Tell Lightning's loops whether the batch is the last one of the epoch."""
        loop = self._trainer.fit_loop
        assert loop._data_fetcher is not None
        loop.max_batches = loop.epoch_loop.batch_progress.current.ready if last else float("inf")
        loop.epoch_loop.batch_progress.is_last_batch = last
        loop._data_fetcher.done = last
        loop._data_fetcher.length = NEVER

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: "LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Make a local step, with the learning rate of this rank's batch size; schedulers do not see the factor.

        Nor does the closure, which runs the user's ``training_step``: a learning rate that is set there is scaled, too.
        """
        assert self.engine is not None
        with scaled_rates(optimizer, self.engine.lr_factor, closure) as at_the_given_rates:
            return super().optimizer_step(optimizer, at_the_given_rates, model, **kwargs)

    def end_batch(self) -> MergeRecord | None:
        """Claim the next batch or merge; then schedules, the end of the epoch and validation follow from it."""
        assert self.engine is not None
        trainer = self._trainer
        record = self.engine.end_batch()
        assert self._schedules is not None
        self._schedules.step(self.engine.steps_done(), self.engine.steps_per_epoch, self._pl_module)
        if record is None:
            return None
        if self.engine.diverged:
            for optimizer in self.optimizers:
                optimizer.state.clear()
        self._agree_on_steps()
        if record.end:  # Lightning's loops then raise on all ranks
            trainer._signal_connector.received_sigterm = True
        before = record.position - sum(record.samples)
        self._set_last(self.engine.epoch_over)
        if self.engine.epoch_over and self._automatic:
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        every = trainer.val_check_interval * self.engine.epoch_samples
        due = self.engine.epoch_over or record.position // every > before // every
        trainer.val_check_batch = 1 if due else NEVER
        return record

    def _agree_on_steps(self) -> None:
        """Count rank 0's steps on every rank, which names files and metrics by them, as ``ModelCheckpoint`` does."""
        assert self.engine is not None
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress.optimizer.step.total
        if not self._automatic:
            progress = loop.manual_optimization.optim_step_progress.total
        mine = progress.ready, progress.completed, loop._batches_that_stepped
        progress.ready, progress.completed, loop._batches_that_stepped = self.engine.control.broadcast_object(mine)
