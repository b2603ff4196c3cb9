"""What turns Lightning's ``DDPStrategy`` into elastic averaging; free of the namespace it is mixed into.

Ranks do unequal numbers of batches, which Lightning's loops are not made for. So nothing of Lightning's that all ranks
take part in may run inside a mega-batch: such settings are refused before training, such calls when they are made. An
epoch ends for a rank when the engine says so, and validation is due only at a merge.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero.callbacks._elastic import ElasticCallback
from lightning_hetero.core.validation import check_names
from lightning_hetero.elastic import ElasticConfig, ElasticEngine, MergeRecord
from lightning_hetero.frontend.loaders import NOT_MET, stream_of, why_not_uneven, with_batch_sampler
from lightning_hetero.frontend.log import log
from lightning_hetero.strategies._arguments import arguments_of
from lightning_hetero.strategies._lightning.ddp import resume_position
from lightning_hetero.strategies._lightning.elastic_rates import scaled_rates
from lightning_hetero.strategies._lightning.elastic_requirements import why_not_elastic
from lightning_hetero.strategies._lightning.ending import AloneMixin
from lightning_hetero.strategies._lightning.signals import defer_sigterm
from lightning_hetero.strategies._registration import register
from lightning_hetero.strategies._whole_files import WholeFilesMixin

__all__ = ["HeteroElasticMixin"]

STATE = "hetero_elastic"
NEVER = sys.maxsize
DDP_ARGUMENTS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
)


class HeteroElasticMixin(AloneMixin, WholeFilesMixin):
    """Elastic averaging with dynamic dispatch, for work whose time cannot be predicted (Adaptive SGD).

    Every rank trains a replica with an optimizer of its own on batches that it takes one by one; after each mega-batch
    the replicas are merged. The DataLoader's ``batch_size`` is the largest batch of a worker, with which all begin.

    Args:
        merge: ``"adaptive"`` (default), ``"elastic"``, ``"crossbow"`` or ``"mean"``.
        mega_batch_size: samples between two merges.
        mega_batch_batches: the same in batches of the DataLoader's size, of all workers together; default 100.
        min_batch_size: smallest batch of a worker; default an eighth of the DataLoader's ``batch_size``.
        beta: samples by which a batch size changes per update of deviation; default half the smallest batch.
        perturbation: what the most updated replica counts more and the least updated less, 0 to 1.
        perturbation_threshold: weights are perturbed only if all replicas' norms per parameter are below.
        momentum: of the global model, 0 to below 1; by default the paper's 0.9 for SGD without momentum, else 0.
        renormalize: whether weights sum to 1 after the perturbation too; the paper's do not.
        damped: whether batch sizes stop where a worker would have done the mean number of updates, and the largest is
            always the DataLoader's; the paper's do not.
        kwargs: of Lightning's ``DDPStrategy``: ``timeout``, ``process_group_backend``, ``start_method``, and plugins.

    Raises:
        TypeError: if an argument has the wrong type, or is one for DDP's gradient averaging, which there is none of.
        ValueError: if an argument is out of range, or two of them contradict each other.

    Example:
        >>> from lightning_hetero import HeteroElasticStrategy
        >>> HeteroElasticStrategy(merge="elastic", mega_batch_batches=20).config.samples(batch_size=8, world_size=2)
        160
    """

    strategy_name = "hetero_elastic"

    def __init__(
        self,
        merge: str = "adaptive",
        mega_batch_size: int | None = None,
        mega_batch_batches: int | None = None,
        min_batch_size: int | None = None,
        beta: float | None = None,
        perturbation: float = 0.1,
        perturbation_threshold: float = 0.1,
        momentum: float | None = None,
        renormalize: bool = True,
        damped: bool = True,
        **kwargs: Any,
    ) -> None:
        for_gradients = sorted(set(kwargs) & set(arguments_of(type(self))) - set(DDP_ARGUMENTS))
        if for_gradients:
            raise TypeError(
                f"hetero_elastic averages models, so there is no gradient averaging that {', '.join(for_gradients)} "
                f"could change. Leave it out; what it takes of DDPStrategy's arguments is {', '.join(DDP_ARGUMENTS)}."
            )
        own = list(inspect.signature(HeteroElasticMixin.__init__).parameters)[1:-1]
        check_names(type(self).__name__, kwargs, [*own, *DDP_ARGUMENTS])
        settings = {
            "min_batch_size": min_batch_size,
            "beta": beta,
            "perturbation": perturbation,
            "perturbation_threshold": perturbation_threshold,
            "momentum": momentum,
            "renormalize": renormalize,
            "damped": damped,
        }
        self.config = ElasticConfig(merge, mega_batch_size, mega_batch_batches, settings)
        super().__init__(**kwargs)
        self.engine: ElasticEngine | None = None
        self._callback = ElasticCallback()
        self._schedulers: list[tuple[Any, int]] = []
        self._scheduled = 0

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_elastic`` and its aliases."""
        register(cls, strategy_registry)

    @property
    def merges(self) -> tuple[MergeRecord, ...]:
        """All merges of this run."""
        return () if self.engine is None else tuple(self.engine.merges)

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer  # type: ignore[attr-defined]

    def _misconfigured(self, message: str) -> Exception:
        """``MisconfigurationException`` of the namespace in use."""
        base = next(c.__module__ for c in type(self).__mro__ if c.__name__ == "DDPStrategy").rpartition(".strategies")
        error: type[Exception] = importlib.import_module(f"{base[0]}.utilities.exceptions").MisconfigurationException
        return error(message)

    # set-up

    def connect(self, model: Any) -> None:
        """Attach the module, and our callback before all others."""
        super().connect(model)  # type: ignore[misc]
        self._attach_callback()

    def _attach_callback(self) -> None:
        """Put our callback before all others, once the module has a trainer: by hand, that may be after `connect`."""
        module = self.lightning_module  # type: ignore[attr-defined]
        if getattr(module, "_trainer", None) is not None and self._callback not in module.trainer.callbacks:
            module.trainer.callbacks.insert(0, self._callback)

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        super().setup_environment()  # type: ignore[misc]
        self._attach_callback()
        if self.engine is None:
            self.engine = ElasticEngine(
                self.config,
                rank=self.global_rank,  # type: ignore[attr-defined]
                world_size=self.world_size,  # type: ignore[attr-defined]
                timeout=self._timeout,  # type: ignore[attr-defined]
            )

    def configure_ddp(self) -> None:
        """Leave the model unwrapped, equal on all ranks.

        Raises:
            MisconfigurationException: if something is asked for that all ranks would have to do inside a mega-batch.
        """
        assert self.engine is not None
        reason = why_not_elastic(self._trainer, self._layer_sync)  # type: ignore[attr-defined]
        if reason is not None:
            raise self._misconfigured(reason)
        if self._trainer.fast_dev_run:
            self._trainer.fit_loop.epoch_loop.max_steps = -1  # the limit on batches holds; ranks do it together
        self.engine.attach(self.lightning_module)  # type: ignore[attr-defined]

    def setup_optimizers(self, trainer: Any) -> None:
        """As DDP; the momentum of the global model follows from the optimizers.

        Raises:
            MisconfigurationException: if replicas that an optimizer trains cannot be merged.
        """
        super().setup_optimizers(trainer)  # type: ignore[misc]
        assert self.engine is not None
        try:
            self.engine.follow(self.optimizers)  # type: ignore[attr-defined]
        except ValueError as error:
            raise self._misconfigured(str(error)) from error

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make the train loader draw the batches that this rank claims; leave other loaders alone.

        Raises:
            MisconfigurationException: if its samples cannot be claimed.
        """
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if self._trainer.state.stage != "train":
            return dataloader
        if self.engine is None:
            log.warning(NOT_MET, "Trainer.fit()")
            return dataloader
        reason = why_not_uneven(dataloader, self.engine.world_size)
        if reason is None and dataloader.num_workers > 0:
            reason = (
                f"the train DataLoader has num_workers={dataloader.num_workers}, which would claim batches long before "
                "this rank can train on them. Set num_workers=0"
            )
        if reason is not None:
            raise self._misconfigured(f"{reason}, or use strategy='ddp'.")
        batches, limit = dataloader.batch_sampler, self._trainer.limit_train_batches
        normalised = any(isinstance(m, _BatchNorm) for m in self.lightning_module.modules())  # type: ignore[attr-defined]
        stream = stream_of(dataloader)
        assert stream is not None
        sampler = self.engine.shard(
            stream,
            batches.batch_size,
            drop_last=batches.drop_last,
            least=2 if normalised else 1,
            limit=None if isinstance(limit, float) and limit == 1.0 else limit,
        )
        clone: Any = with_batch_sampler(dataloader, sampler)
        # Lightning takes a loader with these for one that can go on inside an epoch; the engine knows the position.
        clone.state_dict = dict
        clone.load_state_dict = lambda state: None
        return clone

    def on_train_start(self) -> None:
        """Take over what Lightning would do batch by batch on all ranks alike.

        Raises:
            MisconfigurationException: if there are several train loaders, or a scheduler that needs a metric each step.
        """
        super().on_train_start()  # type: ignore[misc]
        assert self.engine is not None
        loop = self._trainer.fit_loop
        if loop._combined_loader is not None and len(loop._combined_loader.flattened) > 1:
            raise self._misconfigured("hetero_elastic takes one train loader. Combine the datasets in one DataLoader.")
        loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # a collective in every batch
        defer_sigterm(self._trainer, self.engine.request_end)
        ended = loop.restarting and loop.epoch_loop.batch_progress.is_last_batch
        self._trainer.val_check_batch = 1 if ended else NEVER
        self._schedulers = []
        for config in self.lr_scheduler_configs if self._automatic else ():  # type: ignore[attr-defined]
            if config.interval == "step" and config.reduce_on_plateau:
                raise self._misconfigured(
                    "a ReduceLROnPlateau with interval='step' needs a metric of all ranks in every batch. Use "
                    "interval='epoch'."
                )
            if config.interval == "step":
                self._schedulers.append((config.scheduler, config.frequency))
                config.frequency = NEVER
        self._scheduled = self.engine.steps_done()

    @property
    def _automatic(self) -> bool:
        return bool(self.lightning_module.automatic_optimization)  # type: ignore[attr-defined]

    # one batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin to train on a batch, which is not the last of the epoch as far as is known now."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        assert self.engine is not None
        self.engine.begin_batch()
        self._set_last(False)
        self._trainer.val_check_batch = NEVER

    def _set_last(self, last: bool) -> None:
        """Tell Lightning's loops whether the batch is the last one of the epoch."""
        loop = self._trainer.fit_loop
        loop.max_batches = loop.epoch_loop.batch_progress.current.ready if last else float("inf")
        loop.epoch_loop.batch_progress.is_last_batch = last
        loop._data_fetcher.done = last
        loop._data_fetcher.length = NEVER

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One local step, with the learning rate of this rank's batch size; schedulers do not see the factor.

        Nor does the closure, which runs the user's ``training_step``: a learning rate that is set there is scaled, too.
        """
        assert self.engine is not None
        with scaled_rates(optimizer, self.engine.lr_factor, closure) as at_the_given_rates:
            return super().optimizer_step(optimizer, at_the_given_rates, model, **kwargs)  # type: ignore[misc]

    def end_batch(self) -> MergeRecord | None:
        """Claim the next batch or merge; then schedules, the end of the epoch and validation follow from it."""
        assert self.engine is not None
        trainer = self._trainer
        record = self.engine.end_batch()
        self._step_schedulers()
        if record is None:
            return None
        if self.engine.diverged:
            for optimizer in self.optimizers:  # type: ignore[attr-defined]
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

    def _step_schedulers(self) -> None:
        """Schedules with ``interval="step"`` go by what a synchronous run would have done with the same samples."""
        assert self.engine is not None
        done = self.engine.steps_done()
        for step in range(self._scheduled + 1, done + 1):
            for scheduler, frequency in self._schedulers:
                if ((step - 1) % self.engine.steps_per_epoch + 1) % frequency == 0:
                    self.lightning_module.lr_scheduler_step(scheduler, None)  # type: ignore[attr-defined]
        self._scheduled = max(self._scheduled, done)

    # what needs all ranks

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDP reduces, between mega-batches only; a mean of integers is exact."""
        self._require_merged("reducing a value over ranks (self.log with sync_dist=True and on_step=True?)")
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if isinstance(tensor, torch.Tensor) and is_mean and not torch.is_floating_point(tensor):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As DDP, between mega-batches only."""
        self._require_merged("a barrier")
        super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As DDP, between mega-batches only."""
        self._require_merged("a broadcast")
        return super().broadcast(obj, src)  # type: ignore[misc]

    def all_gather(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As DDP, between mega-batches only."""
        self._require_merged("an all_gather")
        return super().all_gather(*args, **kwargs)  # type: ignore[misc, no-any-return]

    @property
    def _told_together(self) -> bool:
        return self.world_size == 1 or self._trainer.received_sigterm  # type: ignore[attr-defined]  # set at a merge

    def _require_merged(self, what: str) -> None:
        if self.engine is not None and not self._alone:
            self.engine.require_merged(what)

    # state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the merged model as Lightning does, with what each rank's replica has of its own.

        A rank that fails alone saves nothing: its replica is not the model, and others' optimizers cannot be asked for.

        Raises:
            RuntimeError: inside a mega-batch.
        """
        if self._alone:
            log.warning("no checkpoint %s: a worker that fails between two merges has no model to save", filepath)
            return
        self._require_merged("a checkpoint")
        if self.engine is not None and "optimizer_states" in checkpoint:
            own = self.engine.control.gather_objects_at_zero(checkpoint["optimizer_states"])
            checkpoint[STATE] = {**self.engine.state_dict(), "optimizer_states": own}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint, ours or one of plain Lightning's."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        if self.engine is None:
            return checkpoint
        position = resume_position(checkpoint)
        if STATE in checkpoint:
            self.engine.load_state_dict(checkpoint[STATE])
        elif position is not None:
            self.engine.resume_at(*position)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Each rank's optimizer goes on from its own state; with more ranks than before they share them."""
        own = checkpoint.get(STATE, {}).get("optimizer_states")
        if own and self.engine is not None:
            checkpoint = {**checkpoint, "optimizer_states": own[self.engine.rank % len(own)]}
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    def teardown(self) -> None:
        """End the run; the merges can still be read."""
        module = self.lightning_module  # type: ignore[attr-defined]
        if module is not None and module._trainer is not None:
            vars(module.trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        if self.engine is not None:
            self.engine.dispatcher.close()
        super().teardown()  # type: ignore[misc]
