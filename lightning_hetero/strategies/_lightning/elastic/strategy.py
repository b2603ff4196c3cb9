"""Lightning's ``DDPStrategy`` with elastic averaging in place of gradient averaging, as a mixin for either package.

Ranks train on unequal numbers of batches, which Lightning's loops do not expect. So none of Lightning's collectives may
run inside a mega-batch: settings that need one are refused before training, direct calls when they are made. A rank's
epoch ends when the engine says so, and validation is due only at a merge.
"""

import inspect
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_hetero.callbacks._elastic import ElasticCallback
from lightning_hetero.callbacks._lightning import callbacks_of
from lightning_hetero.comm.agreement.group_lifetime import ended, go_on
from lightning_hetero.core.keywords import check_names
from lightning_hetero.elastic import ElasticConfig, ElasticEngine, MergeRecord
from lightning_hetero.frontend.joining import joining
from lightning_hetero.frontend.loaders import NOT_MET, batches_of, stream_of, unsupported_reason, with_batch_sampler
from lightning_hetero.frontend.log import log, show_log
from lightning_hetero.frontend.model_setup import has_batch_norm
from lightning_hetero.strategies._arguments import arguments_of
from lightning_hetero.strategies._checkpoints.whole_files import WholeFilesMixin
from lightning_hetero.strategies._lightning.elastic.checkpoint import ElasticCheckpointMixin
from lightning_hetero.strategies._lightning.elastic.requirements import unsupported_settings
from lightning_hetero.strategies._lightning.elastic.steps import NEVER, ElasticStepsMixin
from lightning_hetero.strategies._lightning.signals import CHECK, restore_sigterm, sigterm_at_next_merge
from lightning_hetero.strategies._registration import register

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["HeteroElasticMixin"]

show_log()

DDP_ARGUMENTS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
)


class HeteroElasticMixin(ElasticStepsMixin, ElasticCheckpointMixin, WholeFilesMixin):
    """Elastic averaging with dynamic dispatch, for work whose time cannot be predicted (Adaptive SGD).

    Every rank trains its own replica, with its own optimizer, on batches that it claims one by one; the replicas are
    merged after each mega-batch. The DataLoader's ``batch_size`` is the largest batch of a worker; all begin with it.

    Args:
        merge: ``"adaptive"`` (default), ``"elastic"``, ``"crossbow"`` or ``"mean"``.
        mega_batch_size: samples between two merges.
        mega_batch_batches: the same in batches of the DataLoader's size, of all workers together; default 100.
        min_batch_size: smallest batch of a worker; default an eighth of the DataLoader's ``batch_size``.
        beta: samples by which a worker's batch size changes for each update that it has done above or below the mean;
            default half the smallest batch.
        perturbation: share by which the merge weight of the most updated replica is raised and that of the least
            updated one lowered, 0 to 1.
        perturbation_threshold: weights are perturbed only if every replica's norm per parameter is below it.
        momentum: momentum of the global model, ``0 <= momentum < 1``; by default the paper's 0.9 if the optimizer is
            SGD without momentum, else 0.
        renormalize: whether the weights sum to 1 after the perturbation too; in the paper they do not.
        damped: whether a batch size changes no further than to where the worker would have done the mean number of
            updates, and the largest one stays the DataLoader's; in the paper neither holds.
        kwargs: arguments of Lightning's ``DDPStrategy``: ``timeout``, ``process_group_backend``, ``start_method``, and
            plugins.

    Raises:
        TypeError: if an argument has the wrong type, or belongs to gradient averaging, which this strategy replaces.
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
        self._told = False
        self._callback = ElasticCallback()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_elastic`` and its aliases."""
        register(cls, strategy_registry)

    @property
    def merges(self) -> tuple[MergeRecord, ...]:
        """All merges of this run."""
        return () if self.engine is None else tuple(self.engine.merges)

    # set-up

    def connect(self, model: "LightningModule") -> None:
        """Attach the module, and our callback before all others."""
        super().connect(model)
        self._attach_callback()

    def _attach_callback(self) -> None:
        """Put our callback before all others, once the module has a trainer, which may come after `connect`."""
        trainer = self._trainer_if_any
        if trainer is not None and self._callback not in callbacks_of(trainer):
            callbacks_of(trainer).insert(0, self._callback)

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        self.set_world_ranks()
        with joining(self):
            super().setup_environment()
        self._attach_callback()
        if self.engine is None:
            self.engine = ElasticEngine(
                self.config,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        else:
            go_on(self.engine.control)
        self.engine.control.failures.open()
        self._told = False
        if self._trainer_if_any is not None:
            sigterm_at_next_merge(self._trainer, self._end_at_next_merge)

    def _end_at_next_merge(self) -> None:
        """Note SIGTERM, which may come before the engine has begun."""
        self._told = True
        assert self.engine is not None
        self.engine.request_end()

    def configure_ddp(self) -> None:
        """Leave the model unwrapped, equal on all ranks.

        Raises:
            MisconfigurationException: if a setting needs all ranks inside a mega-batch.
        """
        assert self.engine is not None
        trainer: Any = self._trainer
        reason = unsupported_settings(trainer, self._layer_sync)
        if reason is not None:
            raise self._misconfiguration(reason)
        if trainer.fast_dev_run:
            trainer.fit_loop.epoch_loop.max_steps = -1  # the limit on batches holds; ranks do it together
        self.engine.attach(self._pl_module)

    def setup_optimizers(self, trainer: "Trainer") -> None:
        """Set up optimizers, and derive the momentum of the global model from them.

        Raises:
            MisconfigurationException: if replicas that an optimizer trains cannot be merged.
        """
        super().setup_optimizers(trainer)
        assert self.engine is not None
        try:
            self.engine.follow(self.optimizers)
        except ValueError as error:
            raise self._misconfiguration(str(error)) from error

    def process_dataloader(self, dataloader: object) -> object:
        """Make the train loader draw the batches that this rank claims; leave other loaders alone.

        Raises:
            MisconfigurationException: if its samples cannot be claimed.
        """
        dataloader = super().process_dataloader(dataloader)
        if self._trainer.state.stage != "train":
            return dataloader
        if self.engine is None:
            log.warning(NOT_MET, "Trainer.fit()")
            return dataloader
        reason = unsupported_reason(dataloader, self.engine.world_size)
        if isinstance(dataloader, DataLoader) and reason is None:
            return self._shard(self.engine, dataloader)
        raise self._misconfiguration(f"{reason}, or use strategy='ddp'.")

    def _shard(self, engine: ElasticEngine, loader: DataLoader) -> DataLoader:
        if loader.num_workers > 0:
            raise self._misconfiguration(
                f"the train DataLoader has num_workers={loader.num_workers}, which would claim batches long before "
                "this rank can train on them. Set num_workers=0, or use strategy='ddp'."
            )
        stream, limit = stream_of(loader), self._trainer.limit_train_batches
        batches = batches_of(loader)
        assert stream is not None
        sampler = engine.shard(
            stream,
            batches.batch_size,
            drop_last=batches.drop_last,
            least=2 if has_batch_norm(self._pl_module) else 1,
            limit=None if isinstance(limit, float) and limit == 1.0 else limit,
        )
        clone: Any = with_batch_sampler(loader, sampler)
        # These two mark a loader that can resume inside an epoch for Lightning; the engine knows the position.
        clone.state_dict = dict
        clone.load_state_dict = lambda state: None
        return clone

    def on_train_start(self) -> None:
        """Take over what Lightning would do at every batch on all ranks.

        Raises:
            MisconfigurationException: if there are several train loaders, or a scheduler that needs a metric each step.
        """
        super().on_train_start()
        assert self.engine is not None
        loop = self._trainer.fit_loop
        if loop._combined_loader is not None and len(loop._combined_loader.flattened) > 1:
            raise self._misconfiguration(
                "hetero_elastic takes one train loader. Combine the datasets in one DataLoader."
            )
        setattr(loop.epoch_loop, CHECK, lambda: None)  # Lightning's is a collective in every batch
        if self._told:
            self.engine.request_end()
        ended = loop.restarting and loop.epoch_loop.batch_progress.is_last_batch
        self._trainer.val_check_batch = 1 if ended else NEVER
        self._begin_schedules()

    # state

    def teardown(self) -> None:
        """End the run; the merges can still be read."""
        trainer = self._trainer_if_any
        if trainer is not None:
            vars(trainer.fit_loop.epoch_loop).pop(CHECK, None)
            restore_sigterm(trainer)
        if self.engine is not None:
            self.engine.dispatcher.close()
            ended(self.engine.control)
            self.engine.control.failures.close()
        super().teardown()
