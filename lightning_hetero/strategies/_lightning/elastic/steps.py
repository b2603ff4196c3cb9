"""One batch of elastic averaging: schedules, the end of the epoch and validation follow merges, not batches."""

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
    """Schedules with ``interval="step"``, stepped as in a synchronous run over the same samples.

    Args:
        configs: all schedules of the trainer; Lightning no longer steps those with ``interval="step"``.
        done: steps of the synchronous run that count as done.
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
            per_epoch: steps of an epoch of that run.
            module: module whose ``lr_scheduler_step`` is called.
        """
        for step in range(self._done + 1, done + 1):
            for scheduler, frequency in self._schedules:
                if ((step - 1) % per_epoch + 1) % frequency == 0:
                    module.lr_scheduler_step(scheduler, None)
        self._done = max(self._done, done)


class ElasticStepsMixin(ElasticCollectivesMixin):
    """Training on the batches that this rank claims, one after another."""

    _schedules: StepSchedules | None = None

    @property
    def _automatic(self) -> bool:
        return bool(self._pl_module.automatic_optimization)

    def _begin_schedules(self) -> None:
        """Take over the schedules with ``interval="step"`` from Lightning.

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
        """Begin a batch, and assume that it is not the epoch's last: that is known only when it ends."""
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
        """Make a local step, with the learning rate scaled for this rank's batch size.

        Neither the schedulers nor the closure see the factor. The closure runs the user's ``training_step``: a learning
        rate that is set there is scaled, too.
        """
        assert self.engine is not None
        with scaled_rates(optimizer, self.engine.lr_factor, closure) as at_the_given_rates:
            return super().optimizer_step(optimizer, at_the_given_rates, model, **kwargs)

    def end_batch(self) -> MergeRecord | None:
        """Claim the next batch, or merge; then step schedules, and see whether the epoch ends or validation is due."""
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
        """Give every rank the step counts of rank 0: file names and metrics (``ModelCheckpoint``) depend on them."""
        assert self.engine is not None
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress.optimizer.step.total
        if not self._automatic:
            progress = loop.manual_optimization.optim_step_progress.total
        mine = progress.ready, progress.completed, loop._batches_that_stepped
        progress.ready, progress.completed, loop._batches_that_stepped = self.engine.control.broadcast_object(mine)
