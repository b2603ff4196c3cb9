"""Lightning's ``ModelParallelStrategy`` (FSDP2) for unequal workers, as a mixin for either of Lightning's packages.

FSDP averages shards of gradients over all ranks. The loss of a rank is weighted where it enters backward, so the
average is that of a single process, as under ``hetero_ddp``. All ranks wait for each other before each layer; their own
time is measured without these waits (:mod:`lightning_hetero.comm.gradients.sharded_groups`).
"""

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_hetero.callbacks._lightning import callbacks_of
from lightning_hetero.comm.gradients.requirements import check_rescaled
from lightning_hetero.comm.gradients.sharded_groups import ShardedGroups
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.keywords import check_names
from lightning_hetero.core.validation import check_int
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.checkpoint_folder import begin_folder, end_folder
from lightning_hetero.frontend.log import show_log
from lightning_hetero.strategies._arguments import refuse_for_own_loops
from lightning_hetero.strategies._checkpoints.shards import whole_checkpoint
from lightning_hetero.strategies._lightning.fsdp import requirements
from lightning_hetero.strategies._lightning.fsdp.mesh import lasting_mesh
from lightning_hetero.strategies._lightning.fsdp.sharding import (
    free_gathered,
    is_sharded,
    shard_module,
    spread_from_first,
    stand_in,
)
from lightning_hetero.strategies._lightning.uneven_steps import UnevenStepsMixin
from lightning_hetero.strategies._registration import register

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["HeteroFSDPMixin"]

show_log()

SIZES = ("data_parallel_size", "tensor_parallel_size")
MODEL_PARALLEL = (*SIZES, "save_distributed_checkpoint", "process_group_backend", "timeout")


class HeteroFSDPMixin(UnevenStepsMixin):
    """Sharded data-parallel training (FSDP2) on unequal workers, with the gradients of a single process.

    Parameters, gradients and the optimizer's state are sharded evenly, batches are split unevenly, as by
    ``hetero_ddp``. If ``configure_model`` calls no ``fully_shard``, the strategy shards blocks, then each network.

    Args:
        policy: policy that splits the batch: ``"perf_model"`` (default), ``"pid"``, ``"static"`` or ``"even"``.
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of the batch, ``"sum"`` if it is their sum.
        local_batch_sizes: fixed split such as ``[24, 12, 16]``, or the first split of ``policy="pid"``; its sum is then
            the total batch.
        min_local_batch_size: fewest samples of a worker; default 1, or 2 if the model has batch normalization.
        max_local_batch_sizes: most samples of a worker (memory), one number or one per worker.
        local_batch_multiple: number of which each worker's samples of a step are a multiple.
        weight_fn: returns the items (tokens, pixels) that a batch's mean loss averages: ``weight_fn(batch) -> number``.
        replan: ``"auto"``, ``"epoch"``, or a number of optimizer steps between two sync rounds.
        hysteresis: least gain, as a share of the step time, for which the plan changes; by default any significant one.
        change_cost: seconds that a change of the split costs (recompiling, autotuning); measured by default.
        balance_evaluation: split validation, test and predict data by speed, without repeating samples.
        auto_wrap_policy: classes of the blocks that the strategy shards, such as ``{GPT2Block}``. By default, members
            of ``nn.ModuleList`` and ``nn.Sequential`` that consist of several modules.
        reshard_after_forward: whether parameters are freed between the forward and the backward pass, as in
            ``fully_shard``: ``True`` (default) needs less memory, ``False`` gathers them once a step instead of twice,
            and loses what is done to parameters after a forward pass without backward.
        mp_policy: a ``MixedPrecisionPolicy`` of ``fully_shard``, in place of ``Trainer(precision=...)``.
        replicate_size: number of replicas of the sharded model (HSDP), which divides the number of workers: shards are
            gathered inside a replica, and gradients are summed over replicas as well. 1 is plain FSDP.
        shard: whose samples a loader has that nobody distributes: ``"mine"``, ``"whole"`` or ``"claim"``.
        batch_sampler: a batch of your own batch sampler is one rank's (``"per_rank"``) or all ranks' (``"global"``).
        slice_fn: with ``batch_size=None``, returns rows of a batch: ``slice_fn(batch, start, stop)``.
        concat_fn: with ``batch_size=None``, puts parts of batches together: ``concat_fn(parts)``.
        cost_fn: cost of a sample, which divides batches: ``"auto"``, ``"tokens"``, ``cost_fn(sample)`` or ``None``.
        report: record the run in the logger's directory, or in a folder given by name, and log a summary at its end.
        kwargs: ``save_distributed_checkpoint``, ``timeout`` and ``process_group_backend`` of Lightning's strategy.

    Raises:
        TypeError: if an argument has the wrong type, or a name is unknown.
        ValueError: if an argument is out of range, contradicts another, or averages in a way that FSDP replaces.

    Example:
        >>> from lightning_hetero import HeteroFSDPStrategy
        >>> HeteroFSDPStrategy(max_local_batch_sizes=[24, 12, 16]).config.max_local_batch_sizes
        (24, 12, 16)
    """

    strategy_name = "hetero_fsdp"

    if TYPE_CHECKING:
        _device_mesh: DeviceMesh | None
        _data_parallel_size: Any
        _tensor_parallel_size: Any
        _save_distributed_checkpoint: bool

        @property
        def device_mesh(self) -> DeviceMesh: ...  # noqa: D102

    def __init__(
        self,
        policy: str | None = None,
        loss_reduction: str = "mean",
        local_batch_sizes: Sequence[int] | None = None,
        min_local_batch_size: int | None = None,
        max_local_batch_sizes: int | Sequence[int] | None = None,
        local_batch_multiple: int = 1,
        weight_fn: Callable[[Any], Any] | None = None,
        replan: str | int = "auto",
        hysteresis: float | None = None,
        change_cost: float | None = None,
        balance_evaluation: bool = False,
        auto_wrap_policy: Collection[type[nn.Module]] | None = None,
        reshard_after_forward: bool | None = None,
        mp_policy: Any = None,
        replicate_size: int = 1,
        shard: str | None = None,
        batch_sampler: str = "per_rank",
        slice_fn: Callable[[Any, int, int], Any] | None = None,
        concat_fn: Callable[[list[Any]], Any] | None = None,
        cost_fn: Callable[..., Any] | str | None = "auto",
        report: bool | str | os.PathLike[str] = True,
        **kwargs: Any,
    ) -> None:
        refuse_for_own_loops(self, kwargs)
        kwargs = requirements.refuse_arguments(type(self).__name__, kwargs)
        own = list(inspect.signature(HeteroFSDPMixin.__init__).parameters)[1:-1]
        check_names(type(self).__name__, kwargs, [*own, *MODEL_PARALLEL])
        self.config = HeteroConfig(
            policy=policy,
            loss_reduction=loss_reduction,
            local_batch_sizes=local_batch_sizes,
            min_local_batch_size=min_local_batch_size,
            max_local_batch_sizes=max_local_batch_sizes,
            local_batch_multiple=local_batch_multiple,
            weight_fn=weight_fn,
            replan=replan,
            hysteresis=hysteresis,
            change_cost=change_cost,
            balance_evaluation=balance_evaluation,
            shard=shard,
            batch_sampler=batch_sampler,
            slice_fn=slice_fn,
            concat_fn=concat_fn,
            cost_fn=cost_fn,
            report=report,
        )
        self.replicate_size = check_int("replicate_size", replicate_size, minimum=1)
        self.auto_wrap_policy = requirements.wrapped_classes(auto_wrap_policy)
        self.shard_settings = requirements.shard_settings(reshard_after_forward, mp_policy)
        super().__init__(**kwargs)
        self.engine: HeteroEngine | None = None
        self._sharded: ShardedGroups | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_fsdp``."""
        register(cls, strategy_registry)

    @property
    def data_parallel_mesh(self) -> DeviceMesh:
        """The mesh of all ranks for ``fully_shard`` in ``configure_model``, as ``(replicate, shard)`` with replicas."""
        return self.device_mesh if self.replicate_size > 1 else self.device_mesh["data_parallel"]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Shares of loaders that are not split unevenly: one for each rank."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # set-up

    def _attach_policy(self) -> None:
        if self._trainer_if_any is not None:
            reason = requirements.unsupported_callback(callbacks_of(self._trainer))
            reason = reason or requirements.unsupported_trainer(self, os.environ)
            if reason is not None:
                raise self._misconfiguration(f"strategy='hetero_fsdp': {reason}.")
        super()._attach_policy()

    def setup_environment(self) -> None:
        """Join the process group, and lay out the ranks: all of them share one model, or ``replicate_size`` replicas.

        Raises:
            ValueError: if the number of ranks is no multiple of the replicas, or not ``data_parallel_size``.
        """
        self.set_world_ranks()
        world = self.world_size
        requirements.check_ranks(world, self.replicate_size, self._data_parallel_size)
        self._data_parallel_size, self._tensor_parallel_size = world, 1
        super().setup_environment()
        self._device_mesh = lasting_mesh(self.device_mesh, self.replicate_size)
        vars(self._pl_module)["_device_mesh"] = self._device_mesh  # its `device_mesh`

    def setup(self, trainer: "Trainer") -> None:
        """Shard the module unless it shards itself, then set up optimizers.

        Raises:
            MisconfigurationException: if gradients of a parameter would not be averaged over all ranks.
            ValueError: if the module cannot be sharded by default, or its forward pass changes weights.
        """
        module, engine = self._pl_module, self.engine
        assert engine is not None
        engine.control.require_equal("the kind of device that a sharded model is on", self.root_device.type)
        self._check_module(engine)
        if engine.world_size > 1:
            check_rescaled(module)
        self._shard_by_default(engine, module)
        free_gathered(module)
        reason = requirements.unsupported_sharding(module, self.world_size)
        if reason is not None:
            raise self._misconfiguration(f"strategy='hetero_fsdp': {reason}.")
        self._stop_watching_groups()
        self._sharded = engine.models[module] = ShardedGroups(module, engine.hook_state, engine.control.maximum_later())
        engine.health.begin()
        super().setup(trainer)

    def _shard_by_default(self, engine: HeteroEngine, module: "LightningModule") -> None:
        """Shard the module, unless ``configure_model`` or an earlier run did."""
        given = {name: value for name, value in self.shard_settings.items() if value is not None}
        if not is_sharded(module):
            engine.control.require_equal(
                "the model and how it is sharded", requirements.layout(module, self.auto_wrap_policy, given)
            )
            spread_from_first(module, self.root_device)
            shard_module(module, self.data_parallel_mesh, self.auto_wrap_policy, **given)
            stand_in(module)
            return
        if without_effect := [*given, *(["auto_wrap_policy"] if self.auto_wrap_policy else [])]:
            engine.notices.say(
                f"{', '.join(without_effect)}: without effect, because the model is sharded already, by "
                "configure_model or an earlier run. Give these to fully_shard in configure_model."
            )

    def on_train_start(self) -> None:
        """Check that all ranks resume from the same checkpoint."""
        self._require_one_checkpoint()
        super().on_train_start()

    # one step

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Weight the loss and run backward, if all trained parameters are sharded.

        Raises:
            MisconfigurationException: if one that is not was unfrozen or added in the run.
        """
        reason = requirements.unsupported_training(self._pl_module, self.optimizers)
        if reason is not None:
            raise self._misconfiguration(f"strategy='hetero_fsdp': {reason}.")
        return super().backward(closure_loss, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Count no step inside, while gradients are accumulated; FSDP reduces those of each micro-batch.

        So a worker needs no memory for gradients of the whole model.
        """
        assert self._sharded is not None
        self._sharded.accumulate(True)
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sharded.accumulate(False)

    # checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights as ``ModelParallelStrategy`` does; a collective call.

        Raises:
            RuntimeError: if this rank alone handles an exception, since the others do not bring their shards.
        """
        if self._alone and self.world_size > 1:
            raise RuntimeError(
                "no checkpoint was saved at the exception above: this rank has only its shards of the weights, and the "
                "other ranks do not take part. Save at intervals, with ModelCheckpoint(every_n_train_steps=...)."
            )
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save the checkpoint, a folder of shards with checksums of its files; a collective call."""
        control = None if self.engine is None else self.engine.control
        if control is None or not self._save_distributed_checkpoint or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return

        def begin() -> Path:
            path = Path(filepath)
            if path.is_file():  # an earlier checkpoint
                path.unlink()
            begin_folder(path)
            return path

        path = control.decide(begin)
        super().save_checkpoint(checkpoint, path)
        end_folder(path, control)  # rank 0 comes here when all shards and the rest have been written

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read weights and the optimizer's state into the shards; in a fit, resume the data where it was saved.

        Raises:
            DamagedCheckpointError: on every rank, if a file has changed since it was saved, before it is unpickled.
        """
        if self.engine is not None:
            checkpoint_path = whole_checkpoint(checkpoint_path, self.engine.control)
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._trainer.state.fn == "fit":  # configure_optimizers may have asked for the number of steps
            self._trainer.fit_loop._combined_loader = None
        return checkpoint

    def _stop_watching_groups(self) -> None:
        sharded, self._sharded = self._sharded, None
        if sharded is not None:
            sharded.release()

    def teardown(self) -> None:
        """End the run; the module stays sharded, without our marks."""
        self._stop_watching_groups()
        super().teardown()
