"""What turns Lightning's ``DDPStrategy`` into the heterogeneous one; free of the namespace it is mixed into."""

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.comm.agreement.group_lifetime import go_on
from lightning_hetero.comm.collectives.row_gather import gather_rows, refuse_own_gather
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.compression.settings import Compressor
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.compression import attach_compression, lead_optimizers
from lightning_hetero.frontend.loaders import (
    NOT_MET,
    balanced_evaluation_loader,
    stream_of,
    timed_loader,
    why_not_uneven,
    with_batch_sampler,
)
from lightning_hetero.frontend.log import log, show_log
from lightning_hetero.frontend.plan_access import PlanAccess
from lightning_hetero.frontend.restart_check import warn_of_stale_addresses
from lightning_hetero.frontend.wrap_model import WrappedModel
from lightning_hetero.strategies._arguments import check_arguments, refuse_for_own_loops
from lightning_hetero.strategies._checkpoint import CheckpointMixin, resume_position
from lightning_hetero.strategies._lightning.ending import EndingMixin
from lightning_hetero.strategies._lightning.epoch_length import recount_batches
from lightning_hetero.strategies._lightning.memory_probe import probe_module
from lightning_hetero.strategies._lightning.policy import attach_policy, tell_settings
from lightning_hetero.strategies._lightning.staleness import attach_staleness
from lightning_hetero.strategies._registration import register
from lightning_hetero.strategies._whole_files import WholeFilesMixin

__all__ = ["HeteroDDPMixin", "resume_position"]

show_log()


class HeteroDDPMixin(CheckpointMixin, EndingMixin, WholeFilesMixin, PlanAccess):
    """Distributed data parallel on unequal workers, with the gradients of one process (Cannikin; dynamic batching).

    The DataLoader's ``batch_size`` means what it means under DDP: samples per worker on average, so the total batch is
    ``batch_size * world_size``. Each worker gets the share of it that makes all finish together; losses are weighted by
    that share, ``g = sum_i (b_i / B) g_i``, so the result does not depend on the split.

    Args:
        policy: who splits the batch: ``"perf_model"`` (default), ``"pid"``, ``"static"`` or ``"even"``.
        loss_reduction: ``"mean"`` if the loss is a mean over the samples of the batch, ``"sum"`` if it is their sum.
        local_batch_sizes: a fixed split such as ``[24, 12, 16]``, or what ``policy="pid"`` starts with; its sum is then
            the total batch.
        min_local_batch_size: fewest samples of a worker; default 1, or 2 if the model has batch normalisation.
        max_local_batch_sizes: most samples of a worker (memory), one number or one per worker.
        weight_fn: counts what a batch's mean loss is a mean of (tokens, pixels): ``weight_fn(batch) -> number``.
        replan: ``"auto"``, ``"epoch"``, or a number of optimizer steps between two looks at the plan.
        hysteresis: least predicted gain for which a plan is changed, as a share of the step time; by default what pays.
        change_cost: seconds that a change of the split costs, to compile or tune anew; by default they are measured.
        balance_evaluation: split validation, test and predict data by speed, without repeating samples.
        probe_memory: find each worker's largest batch by trial before training (CUDA).
        compression: what is sent of gradients: ``None`` (all of them), ``BlockTopK(density=0.01)``, ``"block_topk"``,
            ``"powersgd"``, ``"fp16"``, ``"bf16"``, or ``"auto"`` (block top-k where it shortens the step).
        hierarchy: clusters of workers that a thin link joins: ``[[0, 1, 2], [3]]``, ``"nodes"`` (by host), ``"env"`` or
            ``"auto"``; gradients are summed inside of each, and one worker of each exchanges sums with the others.
        sparse_optimizer: ``True`` lets SGD or AdamW update only the blocks that block top-k sends.
        staleness: 1 lets gradients that would make steps wait for the link arrive a step later; 0 lets none.
        nonfinite: ``"warn"`` of a loss that is not finite, ``"drop"`` such gradients on all ranks, or ``"stop"``.
        kwargs: everything that Lightning's ``DDPStrategy`` takes.

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
        self._callback: PolicyCallback | None = None
        self._brought: list[Any] = []

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

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer  # type: ignore[attr-defined]

    @property
    def _namespace(self) -> str:
        """``lightning.pytorch`` or ``pytorch_lightning``, whichever the class was mixed into."""
        return next(c.__module__ for c in type(self).__mro__ if c.__name__ == "DDPStrategy").rpartition(".strategies")[
            0
        ]

    @property
    def _misconfiguration(self) -> type[Exception]:
        """``MisconfigurationException`` of the namespace in use."""
        module = importlib.import_module(f"{self._namespace}.utilities.exceptions")
        error: type[Exception] = module.MisconfigurationException
        return error

    def connect(self, model: Any) -> None:
        """Attach the module, and the callback of the policy unless the user gave one.

        Raises:
            MisconfigurationException: if two policies were given.
        """
        super().connect(model)  # type: ignore[misc]
        attach_policy(self)

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        warn_of_stale_addresses(os.environ)
        self._begin_without_checkpoint()
        self.set_world_ranks()  # type: ignore[attr-defined]
        self.config.check_world_size(self.world_size)  # type: ignore[attr-defined]  # before anybody waits for anybody
        super().setup_environment()  # type: ignore[misc]
        attach_policy(self)  # a module may get its trainer after `connect`
        if self.engine is None:
            self.engine = HeteroEngine(
                self.config,
                rank=self.global_rank,  # type: ignore[attr-defined]
                world_size=self.world_size,  # type: ignore[attr-defined]
                device=self.root_device,  # type: ignore[attr-defined]
                local_rank=self.local_rank,  # type: ignore[attr-defined]
                timeout=self._timeout,  # type: ignore[attr-defined]
            )
        else:
            go_on(self.engine.control, *self.engine.hook_state.topologies)
        self._share_signals()

    def configure_ddp(self) -> None:
        """Look at the model before it is wrapped: its smallest batch and, if asked for, its largest."""
        assert self.engine is not None
        self._require_one_checkpoint()
        module = self.lightning_module  # type: ignore[attr-defined]
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise self._misconfiguration(
                "training_step(dataloader_iter) draws batches by itself, so that their samples cannot be counted. "
                "Take `batch` in training_step, or use strategy='ddp'."
            )
        refuse_own_gather(module, self.engine.world_size, self.config.policy, self._misconfiguration)
        if self.config.min_local_batch_size is None and any(isinstance(m, _BatchNorm) for m in module.modules()):
            self.engine.min_local = 2
        if self.config.probe_memory:
            device: torch.device = self.root_device  # type: ignore[attr-defined]
            self.engine.memory_bound = probe_module(self._trainer, module, device, self.config)
        super().configure_ddp()  # type: ignore[misc]

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """As DDP, on the stream that computes.

        Lightning builds it on another stream, on which torch then accumulates each gradient: an event and a wait for
        every parameter in every step, of which torch warns from 2.10 on.
        """
        devices = self.determine_ddp_device_ids()  # type: ignore[attr-defined]
        return DistributedDataParallel(module=model, device_ids=devices, **self._ddp_kwargs)  # type: ignore[attr-defined]

    def _register_ddp_hooks(self) -> None:
        """Register our hook on every device, with the user's inside it."""
        assert self.engine is not None
        if isinstance(self.model, DistributedDataParallel):  # type: ignore[attr-defined]
            self.engine.health.begin()
            WrappedModel(self.model, self.engine, self._attach, lambda: self.optimizers)  # type: ignore[attr-defined]

    def _attach(self, model: DistributedDataParallel) -> None:
        """Put what sends gradients into our hook: the user's hook, compression, delays."""
        assert self.engine is not None
        self._pl_static_graph_delay_done = False  # Lightning's own, of DDP's first step
        state = self.engine.hook_state
        hook = self._ddp_comm_hook  # type: ignore[attr-defined]
        if hook is not None and self._ddp_comm_wrapper is not None:  # type: ignore[attr-defined]
            hook = self._ddp_comm_wrapper(hook)  # type: ignore[attr-defined]
        state.use_hook(hook, self._ddp_comm_state)  # type: ignore[attr-defined]
        attach_compression(self)
        attach_staleness(self)
        scaled = getattr(self.precision_plugin, "scaler", None) is not None  # type: ignore[attr-defined]
        self.engine.health.attach(model.module, scaled=scaled)

    def setup_optimizers(self, trainer: Any) -> None:
        """As DDP; an optimizer with sparse steps takes the blocks of a compressed gradient."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        lead_optimizers(self)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replace the batch sampler of the train loader by the uneven one; leave other loaders alone by default.

        Raises:
            MisconfigurationException: if the loader cannot be split unevenly and the policy asks for it.
        """
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        training = self._trainer.state.stage == "train"
        if self.engine is None:
            if training or self.config.balance_evaluation:
                log.warning(NOT_MET, "Trainer.fit()")
            return dataloader
        if not training:
            return balanced_evaluation_loader(dataloader, self.engine) if self.config.balance_evaluation else dataloader
        reason = why_not_uneven(dataloader, self.engine.world_size)
        if reason is None:
            return self._shard(dataloader)
        if self.config.policy != "even":
            raise self._misconfiguration(f"{reason}, or set policy='even' to train as plain DDP does.")
        self.engine.notices.say(f"{reason}. With policy='even' it is left as it is, as plain DDP does.")
        self.engine.sampler = None
        return dataloader

    def on_train_start(self) -> None:
        """Refuse several train loaders, now that all of them were seen.

        Raises:
            MisconfigurationException: if there is more than one.
        """
        super().on_train_start()  # type: ignore[misc]
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and len(combined.flattened) > 1:
            raise self._misconfiguration(
                f"there are {len(combined.flattened)} train loaders, whose batches would need a split each. Combine "
                "the datasets in one DataLoader, or use strategy='ddp'."
            )
        self._go_on_counting()
        tell_settings(self)

    def _shard(self, loader: DataLoader) -> DataLoader:
        assert self.engine is not None
        assert self._callback is not None
        stream = stream_of(loader)
        assert stream is not None
        batches: Any = loader.batch_sampler
        sampler = self.engine.shard(
            stream,
            batches.batch_size,
            drop_last=batches.drop_last,
            planner=self._callback.planner,
            epoch=self._trainer.fit_loop.epoch_progress.current.processed,
        )
        self._callback.resume_plans()
        clone: Any = timed_loader(with_batch_sampler(loader, sampler), self.engine)
        # Lightning takes a loader with these for one that can go on inside an epoch. The position itself is read in
        # load_checkpoint, because Lightning asks the loader too late if configure_optimizers had set it up before.
        clone.state_dict = lambda: sampler.state_dict(
            self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        )
        clone.load_state_dict = lambda state: None
        return clone

    def refresh_epoch_length(self) -> None:
        """Make Lightning's counters follow an epoch of another length: batches, validation, progress bar."""
        if self.engine is not None and self.engine.sampler is not None:
            recount_batches(self._trainer, self._namespace)

    # one step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the weight of this batch."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        assert self.engine is not None
        trainer = self._trainer
        counted = self.engine.begin_step(trainer.current_epoch, batch_idx, batch)
        if counted == 0 and trainer._results is not None:
            trainer._results.batch_size = 0  # runs with weight 0: it must not count in logged means either

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Weight the loss by this rank's share of the batch, then run backward."""
        assert self.engine is not None
        loss = self.engine.scale_loss(closure_loss)
        with self.engine.backward():
            result: torch.Tensor = super().backward(loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As DDP.

        Raises:
            RuntimeError: if under manual optimization no backward pass went through the strategy before this step.
        """
        assert self.engine is not None
        module = self.lightning_module  # type: ignore[attr-defined]
        if not module.automatic_optimization:
            self.engine.check_backward()
        self.engine.observer.begin_update()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)  # type: ignore[misc]
        self.engine.observer.end_update()
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDP reduces, but a mean of integers is exact: the size counters of logged means must not be floored."""
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if isinstance(tensor, torch.Tensor) and is_mean and not torch.is_floating_point(tensor):
            tensor = tensor.double()
        with nullcontext() if self.engine is None else self.engine.excluded():
            return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As DDP; what a rank waits here is not counted as computing."""
        if self.engine is None:
            super().barrier(*args, **kwargs)  # type: ignore[misc]
            return
        with self.engine.excluded():
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """As DDP; rows that differ in number between ranks come one rank after another, see :func:`gather_rows`.

        What a rank waits here is not counted as computing.
        """
        stacked = partial(super().all_gather, group=group, sync_grads=sync_grads)  # type: ignore[misc]
        if self.engine is None:
            return stacked(tensor)  # type: ignore[no-any-return]
        with self.engine.excluded():
            return gather_rows(tensor, stacked, self.engine.control, group)

    # state

    def teardown(self) -> None:
        """End the run; the engine stays, so that its plans can be read and a further run goes on from them."""
        if self.engine is not None:
            self.engine.close()
        super().teardown()  # type: ignore[misc]
