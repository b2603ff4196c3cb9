"""Lightning's ``DDPStrategy`` for unequal workers, as a mixin for either of Lightning's two packages."""

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.settings import Compressor
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.compression import lead_optimizers
from lightning_hetero.frontend.log import show_log
from lightning_hetero.frontend.model_setup import attach_module, loss_scaler
from lightning_hetero.frontend.wrap_model import WrappedModel
from lightning_hetero.strategies._arguments import check_arguments, check_communication, refuse_for_own_loops
from lightning_hetero.strategies._lightning.membership.strategy import MembershipMixin
from lightning_hetero.strategies._lightning.out_of_memory.steps import OutOfMemoryMixin
from lightning_hetero.strategies._lightning.probes.memory import probe_module
from lightning_hetero.strategies._lightning.staleness import attach_staleness
from lightning_hetero.strategies._lightning.uneven_steps import UnevenStepsMixin
from lightning_hetero.strategies._registration import register

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["HeteroDDPMixin"]

show_log()


class HeteroDDPMixin(OutOfMemoryMixin, UnevenStepsMixin, MembershipMixin):
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
        local_batch_multiple: number of which each worker's samples of a step are a multiple.
        weight_fn: returns the items (tokens, pixels) that a batch's mean loss averages: ``weight_fn(batch) -> number``.
        replan: ``"auto"``, ``"epoch"``, or a number of optimizer steps between two sync rounds.
        hysteresis: least gain, as a share of the step time, for which the plan changes; by default any significant one.
        change_cost: seconds that a change of the split costs (recompiling, autotuning); measured by default.
        balance_evaluation: split validation, test and predict data by speed, without repeating samples.
        probe_memory: find each worker's largest batch by trial before training (CUDA).
        compression: compression of gradients: ``None`` (off), ``BlockTopK(density=0.01)``, ``"block_topk"``,
            ``"powersgd"``, ``"fp16"``, ``"bf16"``, or ``"auto"`` (block top-k where it shortens the step).
        hierarchy: clusters of workers joined by a low-bandwidth link: ``[[0, 1, 2], [3]]``, ``"nodes"`` (by host),
            ``"env"`` or ``"auto"``. Gradients are summed inside each cluster, and their leaders exchange the sums.
        sparse_optimizer: ``True`` lets SGD or AdamW update only the blocks that block top-k sends.
        staleness: 0 applies every gradient in its own step; 1 applies one step late those that steps would wait for.
        on_nonfinite: what to do about a gradient that is not finite: ``"ignore"`` it as DDP does, and log it once;
            ``"skip"`` the step on all ranks; or ``"raise"``.
        transfer_priority: send the all-reduces that a step waits for before stale ones.
        shard: whose samples a loader has that nobody distributes, such as one over an ``IterableDataset``: ``"mine"``
            (each rank's own), ``"whole"`` (all of them) or ``"claim"`` (shards of a stream are handed out).
        batch_sampler: a batch of your own batch sampler is one rank's (``"per_rank"``) or all ranks' (``"global"``).
        slice_fn: with ``batch_size=None``, returns rows of a batch: ``slice_fn(batch, start, stop)``.
        concat_fn: with ``batch_size=None``, puts parts of batches together: ``concat_fn(parts)``.
        cost_fn: cost of a sample, which divides batches: ``"auto"``, ``"tokens"``, ``cost_fn(sample)`` or ``None``.
        report: record the run in the logger's directory, or in a folder given by name, and log a summary at its end.
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
        local_batch_multiple: int = 1,
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
        on_nonfinite: str = "ignore",
        transfer_priority: bool = False,
        shard: str | None = None,
        batch_sampler: str = "per_rank",
        slice_fn: Callable[[Any, int, int], Any] | None = None,
        concat_fn: Callable[[list[Any]], Any] | None = None,
        cost_fn: Callable[..., Any] | str | None = "auto",
        report: bool | str | PathLike[str] = True,
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
            local_batch_multiple=local_batch_multiple,
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
            on_nonfinite=on_nonfinite,
            shard=shard,
            batch_sampler=batch_sampler,
            slice_fn=slice_fn,
            concat_fn=concat_fn,
            cost_fn=cost_fn,
            report=report,
        )
        check_communication(self.config, kwargs)
        super().__init__(**kwargs)
        self.engine: HeteroEngine | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_ddp`` and every alias that ``ddp`` has."""
        register(cls, strategy_registry)

    # set-up

    def configure_ddp(self) -> None:
        """Find the smallest batch of the model before it is wrapped and, if asked for, the largest."""
        assert self.engine is not None
        self._require_one_checkpoint()
        self._check_module(self.engine)
        self.serve_members(self.engine)
        if self.config.probe_memory:
            module = self._pl_module
            self.engine.data.bound_by_memory(probe_module(self._trainer, module, self.root_device, self.config))
        super().configure_ddp()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Wrap the model as Lightning's DDP does, but on the compute stream.

        Lightning wraps it on another stream, on which torch then accumulates gradients: each parameter costs an event
        and a wait in every step, and torch warns of it from 2.10 on.
        """
        return DistributedDataParallel(module=model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

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
