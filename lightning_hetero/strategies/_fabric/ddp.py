"""Fabric's ``DDPStrategy`` for unequal workers, as a mixin for either of Lightning's two packages."""

import os
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hetero.config import HeteroConfig
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.collectives import gather_unequal, not_computing
from lightning_hetero.frontend.compression import clip_blocks
from lightning_hetero.frontend.model_setup import attach_module, loss_scaler, raise_minimum
from lightning_hetero.frontend.restart_check import warn_of_stale_addresses
from lightning_hetero.frontend.without_effect import tell
from lightning_hetero.frontend.wrap_model import WrappedModel
from lightning_hetero.session import HeteroSession
from lightning_hetero.strategies._arguments import check_arguments
from lightning_hetero.strategies._checkpoints.whole_files import WholeFilesMixin
from lightning_hetero.strategies._fabric.checkpoint import FabricCheckpointMixin
from lightning_hetero.strategies._fabric.logger_folder import folder_of_caller
from lightning_hetero.strategies._registration import register

__all__ = ["HeteroFabricMixin"]


class HeteroFabricMixin(FabricCheckpointMixin, WholeFilesMixin):
    """Fabric's DDP on unequal workers, with the gradients of a single process: ``Fabric(strategy="hetero_ddp")``.

    The strategy splits one loader by speed: the first one given to ``setup_dataloaders`` that shuffles or has its own
    sampler; if none does, the first one. In the latter case, passes with gradients off or all models in ``eval()`` are
    not split. All other loaders stay as they are. ``batch_size`` means the same as under ``ddp``.

    Args:
        kwargs: settings of :class:`~lightning_hetero.config.HeteroConfig` (``policy``, ``local_batch_sizes``, ...), and
            arguments of Fabric's ``DDPStrategy``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or two of them contradict each other.

    Example:
        >>> from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy
        >>> HeteroDDPStrategy(local_batch_sizes=[24, 12, 16]).config.local_batch_sizes
        (24, 12, 16)
    """

    strategy_name = "hetero_ddp"

    def __init__(self, **kwargs: Any) -> None:
        check_arguments(self, kwargs)
        names = [field.name for field in fields(HeteroConfig)]
        self.config = HeteroConfig(**{name: kwargs.pop(name) for name in names if name in kwargs})
        if self.config.probe_memory:
            raise ValueError("probe_memory=True tries out a LightningModule; under Fabric, give max_local_batch_sizes.")
        if self.config.staleness:
            raise ValueError(
                "staleness=1 needs a trainer that applies the last sums; under Fabric, set staleness=0, or compress "
                "gradients with compression='block_topk'."
            )
        super().__init__(**kwargs)
        self.session: HeteroSession | None = None
        self.metrics: dict[str, float] = {}
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Optimizer] = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_ddp`` and every alias that ``ddp`` has."""
        register(cls, strategy_registry)

    # set-up

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        warn_of_stale_addresses(os.environ)
        self._set_world_ranks()
        self.config.check_world_size(self.world_size)  # before the first collective call
        super().setup_environment()
        engine = HeteroEngine(
            self.config,
            rank=self.global_rank,
            world_size=self.world_size,
            device=self.root_device,
            local_rank=self.local_rank,
            timeout=self._timeout,
        )
        folder = folder_of_caller(self) if engine.rank == 0 else None
        self.session = HeteroSession(engine, on_metrics=self.metrics.update, directory=folder, front_end="Fabric")
        tell(engine, self.session.planner)

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap the model as DDP does, with our communication hook."""
        session = self._met()
        if session is None:
            return super().setup_module(module)
        engine = session.engine
        if raise_minimum(engine, module):
            session.reshard()
        self._models.append(module)
        # not on a stream of its own, as Fabric does: torch would accumulate gradients there, and wait for each of them
        devices = self._determine_ddp_device_ids()
        model = DistributedDataParallel(module=module, device_ids=devices, **self._ddp_kwargs)
        WrappedModel(model, engine, self._attach, lambda: self._optimizers)
        session.watch(model)
        return model

    def _attach(self, model: DistributedDataParallel) -> None:
        attach_module(self._running().engine, model, loss_scaler(self.precision))

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make an optimizer's rate follow the total, and its sparse steps take the blocks of compressed gradients."""
        optimizer = super().setup_optimizer(optimizer)
        self._optimizers.append(optimizer)
        compression = None if self.engine is None else self.engine.compression
        if compression is not None:
            compression.bind_optimizers([optimizer], more=True)
            clip_blocks(self.precision, compression)
        if self.session is not None:
            self.session.lead(self._optimizers, scaler=loss_scaler(self.precision))
        return optimizer

    # one step

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Weight the loss by this rank's share of the batch, then run backward."""
        engine = self.engine
        if engine is None:
            super().backward(tensor, module, *args, **kwargs)
            return
        loss = engine.scale_loss(tensor)
        with engine.backward():
            super().backward(loss, module, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as DDP does, timed."""
        if self.engine is None:
            return super().optimizer_step(*args, **kwargs)
        observer = self.engine.observer
        observer.begin_update()
        result = super().optimizer_step(*args, **kwargs)
        observer.end_update()
        return result

    def all_reduce(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Reduce as DDP does, with equal weights for all ranks; waiting does not count as computing."""
        with not_computing(self.engine):
            return super().all_reduce(*args, **kwargs)

    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather as DDP does; unequal numbers of rows are concatenated rank by rank, see :func:`gather_rows`.

        Waiting does not count as computing.
        """
        stacked = partial(super().all_gather, group=group, sync_grads=sync_grads)
        return gather_unequal(self.engine, tensor, stacked, group)

    def barrier(self, *args: object, **kwargs: object) -> None:
        """Wait for all ranks; waiting does not count as computing."""
        with not_computing(self.engine):
            super().barrier(*args, **kwargs)

    # state

    def teardown(self) -> None:
        """End the run."""
        if self.session is not None:
            self.session.close()
        super().teardown()
