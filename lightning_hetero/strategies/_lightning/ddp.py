"""Lightning's ``DDPStrategy`` for unequal workers, as a mixin for either of Lightning's two packages."""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.agreement.group_lifetime import go_on
from lightning_hetero.comm.collectives.row_gather import refuse_own_gather
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.compression.settings import Compressor
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.compression import lead_optimizers
from lightning_hetero.frontend.log import show_log
from lightning_hetero.frontend.model_setup import attach_module, loss_scaler, raise_minimum
from lightning_hetero.frontend.plan_access import PlanAccess
from lightning_hetero.frontend.restart_check import warn_of_stale_addresses
from lightning_hetero.frontend.wrap_model import WrappedModel
from lightning_hetero.strategies._arguments import check_arguments, refuse_for_own_loops
from lightning_hetero.strategies._checkpoints.whole_files import WholeFilesMixin
from lightning_hetero.strategies._lightning.checkpoint import CheckpointMixin
from lightning_hetero.strategies._lightning.collectives import CollectivesMixin
from lightning_hetero.strategies._lightning.ending import EndingMixin
from lightning_hetero.strategies._lightning.probes.memory import probe_module
from lightning_hetero.strategies._lightning.staleness import attach_staleness
from lightning_hetero.strategies._lightning.train_data import TrainDataMixin
from lightning_hetero.strategies._registration import register

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["HeteroDDPMixin"]

show_log()


class HeteroDDPMixin(TrainDataMixin, CollectivesMixin, CheckpointMixin, EndingMixin, WholeFilesMixin, PlanAccess):
    """Data-parallel training on unequal workers, with the gradients of a single process (Cannikin; dynamic batching).

    As under DDP, the DataLoader's ``batch_size`` is the samples per worker, here on average: the total batch is
    ``batch_size * world_size``. Each worker gets the share of it that lets all finish together. Losses are weighted by
    that share, ``g = sum_i (b_i / B) g_i``, so the result does not depend on the split.

    Args:
        policy: policy that splits the batch: ``"perf_model"`` (default), ``"pid"``, ``"static"`` or ``"even"``.
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of the batch, ``"sum"`` if it is their sum.
        local_batch_sizes: fixed split such as ``[24, 12, 16]``, or the first split of ``policy="pid"``; its sum is then
            the total batch.
        min_local_batch_size: fewest samples of a worker; default 1, or 2 if the model has batch normalization.
        max_local_batch_sizes: most samples of a worker (memory), one number or one per worker.
        weight_fn: returns the items (tokens, pixels) that a batch's mean loss averages: ``weight_fn(batch) -> number``.
        replan: ``"auto"``, ``"epoch"``, or a number of optimizer steps between two sync rounds.
        hysteresis: least predicted gain, as a share of the step time, for which the plan changes, 0 to 1; by default
            any significant gain above the cost of the change (3 % for the choice of stale gradients).
        change_cost: seconds that a change of the split costs (recompiling, autotuning); measured by default.
        balance_evaluation: split validation, test and predict data by speed, without repeating samples.
        probe_memory: find each worker's largest batch by trial before training (CUDA).
        compression: compression of gradients: ``None`` (off), ``BlockTopK(density=0.01)``, ``"block_topk"``,
            ``"powersgd"``, ``"fp16"``, ``"bf16"``, or ``"auto"`` (block top-k where it shortens the step).
        hierarchy: clusters of workers joined by a low-bandwidth link: ``[[0, 1, 2], [3]]``, ``"nodes"`` (by host),
            ``"env"`` or ``"auto"``. Gradients are summed inside each cluster, and their leaders exchange the sums.
        sparse_optimizer: ``True`` lets SGD or AdamW update only the blocks that block top-k sends.
        staleness: 0 applies every gradient in its own step; 1 applies one step late those that steps would wait for.
        nonfinite: ``"warn"`` of a loss that is not finite, ``"drop"`` such gradients on all ranks, or ``"stop"``.
        transfer_priority: send the all-reduces that a step waits for before stale ones.
        kwargs: arguments of Lightning's ``DDPStrategy``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or two of them contradict each other.

    Example:
        >>> from lightning_hetero import HeteroDDPStrategy
        >>> HeteroDDPStrategy(local_batch_sizes=[24, 12, 16]).config.local_batch_sizes
        (24, 12, 16)
    """

    strategy_name = "hetero_ddp"

    def __init__(
        self,
        policy: str | None = None,
        loss_reduction: str = "mean",
        local_batch_sizes: Sequence[int] | None = None,
        min_local_batch_size: int | None = None,
        max_local_batch_sizes: int | Sequence[int] | None = None,
        weight_fn: Callable[[Any], Any] | None = None,
        replan: str | int = "auto",
        hysteresis: float | None = None,
        change_cost: float | None = None,
        balance_evaluation: bool = False,
        probe_memory: bool = False,
        compression: Compressor | str | None = None,
        hierarchy: str | Sequence[Sequence[int]] | None = None,
        sparse_optimizer: bool | str = False,
        staleness: int = 0,
        nonfinite: str = "warn",
        transfer_priority: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_for_own_loops(self, kwargs)
        check_arguments(self, kwargs)
        if hasattr(policy, "setup_device"):  # the first argument of DDPStrategy is the accelerator
            policy, kwargs["accelerator"] = None, policy
        self.config = HeteroConfig(
            policy=policy,
            loss_reduction=loss_reduction,
            local_batch_sizes=local_batch_sizes,
            min_local_batch_size=min_local_batch_size,
            max_local_batch_sizes=max_local_batch_sizes,
            weight_fn=weight_fn,
            replan=replan,
            hysteresis=hysteresis,
            change_cost=change_cost,
            balance_evaluation=balance_evaluation,
            probe_memory=probe_memory,
            compression=compression,
            hierarchy=hierarchy,
            sparse_optimizer=sparse_optimizer,
            staleness=staleness,
            transfer_priority=transfer_priority,
            nonfinite=nonfinite,
        )
        for name, given in (("compression", compression), ("hierarchy", hierarchy)):
            if given is not None and kwargs.get("ddp_comm_hook") is not None:
                raise ValueError(f"{name}= and ddp_comm_hook= both say how gradients are sent. Give one of them.")
        if kwargs.get("model_averaging_period") is not None or isinstance(
            kwargs.get("ddp_comm_state"), PostLocalSGDState
        ):
            raise ValueError(
                "model averaging (post-local SGD) averages models of all workers alike, which is wrong for unequal "
                "batches. Leave model_averaging_period and PostLocalSGDState out."
            )
        super().__init__(**kwargs)
        self.engine: HeteroEngine | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_ddp`` and every alias that ``ddp`` has."""
        register(cls, strategy_registry)

    # what users read

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Change the split, from a step that no rank has drawn yet; all ranks have to call it together."""
        entry = super().adopt(plan, reason)
        self.refresh_epoch_length()
        return entry

    # set-up

    def connect(self, model: "LightningModule") -> None:
        """Attach the module, and the callback of the policy unless the user gave one.

        Raises:
            MisconfigurationException: if two policies were given.
        """
        super().connect(model)
        self._attach_policy()

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        warn_of_stale_addresses(os.environ)
        self._begin_without_checkpoint()
        self.set_world_ranks()
        self.config.check_world_size(self.world_size)  # before the first collective call
        super().setup_environment()
        self._attach_policy()  # a module may get its trainer after `connect`
        if self.engine is None:
            self.engine = HeteroEngine(
                self.config,
                rank=self.global_rank,
                world_size=self.world_size,
                device=self.root_device,
                local_rank=self.local_rank,
                timeout=self._timeout,
            )
        else:
            go_on(self.engine.control, *self.engine.hook_state.topologies)
        self._share_signals()

    def configure_ddp(self) -> None:
        """Find the smallest batch of the model before it is wrapped and, if asked for, the largest."""
        assert self.engine is not None
        self._require_one_checkpoint()
        module = self._pl_module
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise self._misconfiguration(
                "training_step(dataloader_iter) draws batches by itself, so that their samples cannot be counted. "
                "Take `batch` in training_step, or use strategy='ddp'."
            )
        refuse_own_gather(module, self.engine.world_size, self.config.policy, self._misconfiguration)
        raise_minimum(self.engine, module)
        if self.config.probe_memory:
            self.engine.data.bound_by_memory(probe_module(self._trainer, module, self.root_device, self.config))
        super().configure_ddp()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Wrap the model as Lightning's DDP does, but on the compute stream.

        Lightning wraps it on another stream, on which torch then accumulates gradients: each parameter costs an event
        and a wait in every step, and torch warns of it from 2.10 on.
        """
        devices = self.determine_ddp_device_ids()
        return DistributedDataParallel(module=model, device_ids=devices, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """Register our hook on every device, with the user's inside it."""
        assert self.engine is not None
        if isinstance(self.model, DistributedDataParallel):
            self.engine.health.begin()
            WrappedModel(self.model, self.engine, self._attach, partial(getattr, self, "optimizers"))

    def _attach(self, model: DistributedDataParallel) -> None:
        """Give our hook its ways to send gradients: the user's hook, compression, staleness."""
        assert self.engine is not None
        self._pl_static_graph_delay_done = False  # Lightning's own, of DDP's first step
        state = self.engine.hook_state
        hook = self._ddp_comm_hook
        if hook is not None and self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        state.use_hook(hook, self._ddp_comm_state)
        attach_module(self.engine, model, loss_scaler(self.precision_plugin))
        attach_staleness(self)

    def setup_optimizers(self, trainer: "Trainer") -> None:
        """Set up optimizers; those with sparse steps take the blocks of compressed gradients."""
        super().setup_optimizers(trainer)
        lead_optimizers(self)

    def on_train_start(self) -> None:
        """Refuse several train loaders, now that all of them are known.

        Raises:
            MisconfigurationException: if there is more than one.
        """
        super().on_train_start()
        self._require_one_loader()
        self._go_on_counting()
        self._tell_settings()

    # one step

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Begin the step, with the weight of this batch."""
        if self._signals is not None and not self._signals.asked:  # Lightning has no check of its own
            self._signals.check()
        super().on_train_batch_start(batch, batch_idx)
        assert self.engine is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._at = trainer.current_epoch, batch_idx
        counted = self.engine.begin_step(trainer.current_epoch, batch_idx, batch)
        if counted == 0 and trainer._results is not None:
            trainer._results.batch_size = 0  # runs with weight 0: it must not count in logged means either

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Weight the loss by this rank's share of the batch, then run backward."""
        assert self.engine is not None
        loss = self.engine.scale_loss(closure_loss)
        with self.engine.backward():
            result: torch.Tensor = super().backward(loss, optimizer, *args, **kwargs)
        return result

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: "LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Step as DDP does, timed.

        Raises:
            RuntimeError: if under manual optimization no backward pass went through the strategy before this step.
        """
        assert self.engine is not None
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self.engine.check_backward()
        self.engine.observer.begin_update()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.engine.observer.end_update()
        return result

    def teardown(self) -> None:
        """End the run; the engine stays: its plans can still be read, and a further run continues from them."""
        if self.engine is not None:
            self.engine.close()
        super().teardown()
