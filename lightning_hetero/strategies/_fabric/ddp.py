"""What turns Fabric's ``DDPStrategy`` into the heterogeneous one; free of the namespace it is mixed into."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero.comm.collectives.row_gather import gather_rows, refuse_own_gather
from lightning_hetero.config import HeteroConfig
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.compression import clip_blocks
from lightning_hetero.frontend.loaders import (
    NOT_MET,
    balanced_evaluation_loader,
    evaluates,
    iterated_by,
    stream_of,
    why_not_uneven,
    with_batch_sampler,
)
from lightning_hetero.frontend.log import log
from lightning_hetero.frontend.plan_access import PlanAccess
from lightning_hetero.frontend.restart_check import warn_of_stale_addresses
from lightning_hetero.frontend.without_effect import tell, tell_left
from lightning_hetero.frontend.wrap_model import WrappedModel
from lightning_hetero.session import HeteroSession
from lightning_hetero.strategies._arguments import check_arguments
from lightning_hetero.strategies._checkpoint import KEY as RESIDUALS
from lightning_hetero.strategies._checkpoint import add_residuals, take_residuals
from lightning_hetero.strategies._registration import register
from lightning_hetero.strategies._whole_files import WholeFilesMixin

__all__ = ["HeteroFabricMixin"]

KEY = "hetero_ddp"


class HeteroFabricMixin(WholeFilesMixin, PlanAccess):
    """Fabric's DDP on unequal workers, with the gradients of one process: ``Fabric(strategy="hetero_ddp")``.

    The training loader, split by speed, is the first one given to ``setup_dataloaders`` that shuffles or has a sampler
    of its own; where none does, the first one. The others stay as they are, and so does, where none shuffles, a pass
    with gradients off or all models in ``eval()``. ``batch_size`` means what it means under ``ddp``.

    Args:
        kwargs: settings of :class:`~lightning_hetero.config.HeteroConfig` (``policy``, ``local_batch_sizes``, ...), and
            everything that Fabric's ``DDPStrategy`` takes.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or two of them contradict each other.

    Example:
        >>> from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy
        >>> HeteroDDPStrategy(local_batch_sizes=[24, 12, 16]).config.local_batch_sizes
        (24, 12, 16)
    """

    strategy_name = "hetero_ddp"
    _no_engine = "there are no plans and observations yet: they come with fabric.launch()."

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
        self._train_loader: DataLoader | None = None
        self._assumed = False
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._wanted_step: int | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the class under ``hetero_ddp`` and every alias that ``ddp`` has."""
        register(cls, strategy_registry)

    # what users read

    @property
    def engine(self) -> HeteroEngine | None:  # type: ignore[override]
        """The mechanism, once the processes have met."""
        return None if self.session is None else self.session.engine

    @property
    def _reached(self) -> tuple[int, int]:
        return self._running().position

    def _running(self) -> HeteroSession:
        self._known_engine()
        assert self.session is not None
        return self.session

    def _met(self) -> HeteroSession | None:
        """The session; where there is none yet, what is set up is as under plain DDP, and that is said."""
        if self.session is None:
            log.warning(NOT_MET, "fabric.launch()")
        return self.session

    # set-up

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        warn_of_stale_addresses(os.environ)
        self._set_world_ranks()  # type: ignore[attr-defined]
        self.config.check_world_size(self.world_size)  # type: ignore[attr-defined]  # before anybody waits for anybody
        super().setup_environment()  # type: ignore[misc]
        engine = HeteroEngine(
            self.config,
            rank=self.global_rank,  # type: ignore[attr-defined]
            world_size=self.world_size,  # type: ignore[attr-defined]
            device=self.root_device,  # type: ignore[attr-defined]
            local_rank=self.local_rank,  # type: ignore[attr-defined]
            timeout=self._timeout,  # type: ignore[attr-defined]
        )
        self.session = HeteroSession(engine, on_metrics=self.metrics.update)
        tell(engine, self.session.planner)

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap the model as DDP does, with our communication hook."""
        session = self._met()
        if session is None:
            return super().setup_module(module)  # type: ignore[misc, no-any-return]
        engine = session.engine
        refuse_own_gather(module, engine.world_size, self.config.policy)
        normalises = any(isinstance(m, _BatchNorm) for m in module.modules())
        if self.config.min_local_batch_size is None and engine.min_local < 2 and normalises:
            engine.min_local = 2
            session.reshard()
        self._models.append(module)
        # not as Fabric does, on a stream of its own: torch would accumulate gradients there, and wait for each of them
        devices = self._determine_ddp_device_ids()  # type: ignore[attr-defined]
        model = DistributedDataParallel(module=module, device_ids=devices, **self._ddp_kwargs)  # type: ignore[attr-defined]
        WrappedModel(model, engine, self._attach, lambda: self._optimizers)
        session.watch(model)
        return model

    def _attach(self, model: DistributedDataParallel) -> None:
        """Compress the gradients of a model, if it was asked for."""
        engine, scaler = self._running().engine, getattr(self.precision, "scaler", None)  # type: ignore[attr-defined]
        engine.health.attach(model.module, scaled=scaler is not None)
        compression = engine.compression
        if compression is not None:
            compression.attach(
                model.module,
                grad_scale=None if scaler is None else scaler.get_scale,
                hold_unused=bool(model.find_unused_parameters),
            )

    def setup_optimizer(self, optimizer: Any) -> Any:
        """As DDP; its rate follows a total that moves, and sparse steps take the blocks of a compressed gradient."""
        optimizer = super().setup_optimizer(optimizer)  # type: ignore[misc]
        self._optimizers.append(optimizer)
        compression = None if self.engine is None else self.engine.compression
        if compression is not None:
            compression.bind_optimizers([optimizer], more=True)
            clip_blocks(self.precision, compression)  # type: ignore[attr-defined]
        if self.session is not None:
            self.session.lead(self._optimizers, scaler=getattr(self.precision, "scaler", None))  # type: ignore[attr-defined]
        return optimizer

    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        """Split the training loader by speed; leave the others as they are.

        Raises:
            ValueError: if the training loader cannot be split unevenly and the policy asks for it.
        """
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if self._met() is None:
            return dataloader
        shuffles, taken = _shuffles(dataloader), self._train_loader is not None
        engine = self._running().engine
        reason, say = why_not_uneven(dataloader, engine.world_size), engine.notices.say
        if not shuffles and (taken or reason is not None):
            if not taken:
                say(f"{reason}. It is left as it is, as the loader of an evaluation.", loses=True)
            elif self._assumed:
                say("a further loader that does not shuffle is taken for an evaluation's and left even.")
            return self._even(dataloader)
        if taken and not (self._assumed and self._running().position == (0, 0)):
            say("a second training loader is split evenly; only the first one is split by speed.", loses=True)
            return self._announced(dataloader)
        if reason is None:
            return self._shard(dataloader, assumed=not shuffles)
        if self.config.policy not in (None, "even") or self.config.local_batch_sizes is not None:
            raise ValueError(f"{reason}, or leave the policy and the sizes out to train as plain DDP does.")
        tell_left(engine, self._running().planner, f"{reason}. It is split evenly, as plain DDP does.")
        return self._announced(dataloader)

    def _shard(self, loader: DataLoader, assumed: bool) -> Any:
        """The loader as the training loader; if that is ``assumed`` only, a loader that shuffles may take its place."""
        session, stream, batches = self._running(), stream_of(loader), loader.batch_sampler
        assert stream is not None
        if assumed:
            session.engine.notices.say(
                "the first loader is taken for the training loader and split by speed, since none shuffles so far. A "
                "pass over it with gradients off, or with all models in eval(), is an evaluation and even."
            )
        shared = session.shard(stream, batches.batch_size, drop_last=batches.drop_last)  # type: ignore[union-attr]
        clone: Any = with_batch_sampler(loader, shared)
        even = self._even(loader) if assumed else None

        def replaced() -> bool:
            return even is not None and self._train_loader is not clone

        def iterate(open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
            if even is not None and (replaced() or self._evaluating):
                return iter(even)
            return session.steps(open_loader)

        clone = iterated_by(clone, iterate, length=lambda: len(even) if even is not None and replaced() else None)
        clone.state_dict = lambda: {"step": None if replaced() else session.position[1]}
        clone.load_state_dict = self._want_position
        self._train_loader, self._assumed = clone, assumed
        return clone

    @property
    def _evaluating(self) -> bool:
        """Whether what is run now cannot be training: gradients are off, or all models are in ``eval()``."""
        return evaluates(self._models)

    def _even(self, loader: DataLoader) -> DataLoader:
        """An evaluation loader: as DDP has it, or balanced by speed without repeated samples."""
        balanced = self.config.balance_evaluation
        return self._announced(balanced_evaluation_loader(loader, self._running().engine) if balanced else loader)

    def _announced(self, loader: DataLoader) -> DataLoader:
        """The loader, which tells the session when it begins."""
        session = self._running()

        def begin(open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
            return session.beside(open_loader(), lambda: self._evaluating)

        return iterated_by(copy.copy(loader), begin) if type(loader).__iter__ is DataLoader.__iter__ else loader

    def _want_position(self, state: dict[str, Any]) -> None:
        if state["step"] is not None:
            self._wanted_step = int(state["step"])

    # one step

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Weight the loss by this rank's share of the batch, then run backward."""
        engine = self.engine
        if engine is None:
            super().backward(tensor, module, *args, **kwargs)  # type: ignore[misc]
            return
        loss = engine.scale_loss(tensor)
        with engine.backward():
            super().backward(loss, module, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As DDP, timed."""
        if self.engine is None:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        observer = self.engine.observer
        observer.begin_update()
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        observer.end_update()
        return result

    def _excluded(self) -> Any:
        """Around collectives, whose waiting is no computing."""
        return nullcontext() if self.engine is None else self.engine.excluded()

    def all_reduce(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As DDP, which averages ranks alike; what a rank waits here is not counted as computing."""
        with self._excluded():
            return super().all_reduce(*args, **kwargs)  # type: ignore[misc, no-any-return]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """As DDP; rows that differ in number between ranks come one rank after another, see :func:`gather_rows`.

        What a rank waits here is not counted as computing.
        """
        stacked = partial(super().all_gather, group=group, sync_grads=sync_grads)  # type: ignore[misc]
        if self.engine is None:
            return stacked(tensor)  # type: ignore[no-any-return]
        with self._excluded():
            return gather_rows(tensor, stacked, self.engine.control, group)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As DDP; what a rank waits here is not counted as computing."""
        with self._excluded():
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    # state

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the state, with the plans, what was learned, and the gradients that compression has not sent yet."""
        if self.session is not None:
            interval = self.session.interval()
            self.session.engine.observer.discard()
            state = {**state, KEY: {**self.session.state_dict(), **interval}}
            add_residuals(state, self.session.engine)
        super().save_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the state; training goes on in the epoch of the checkpoint, at its first batch.

        If the training loader is in ``state``, it goes on at the exact batch.
        """
        self._wanted_step = None
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]
        session = self.session
        if state and not isinstance(state, torch.nn.Module | torch.optim.Optimizer) and session is not None:
            session.load_state_dict(rest.pop(KEY, {}))
            take_residuals(rest, session.engine)
            rest.pop(RESIDUALS, None)
            if self._wanted_step is not None:
                session.skip(self._wanted_step)
        return rest

    def teardown(self) -> None:
        """End the run."""
        if self.session is not None:
            self.session.close()
        super().teardown()  # type: ignore[misc]


def _shuffles(loader: Any) -> bool:
    """Whether a loader is one to train with: it shuffles, or has a sampler of the user's."""
    if not isinstance(loader, DataLoader):
        return False
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    return inner is not None and not isinstance(inner, SequentialSampler)
