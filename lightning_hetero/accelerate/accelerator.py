"""``HeteroAccelerator``: Accelerate's ``Accelerator`` with batches split by speed and losses weighted by the split."""

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.accelerate.checkpoint import CheckpointAccelerator
from lightning_hetero.accelerate.collectives import CollectivesAccelerator
from lightning_hetero.accelerate.hooks import HookedDDP
from lightning_hetero.accelerate.loaders import (
    announced_loader,
    not_dispatched,
    training_loader,
    uneven_loader,
    uneven_stream,
    unsupported_reason,
)
from lightning_hetero.accelerate.plugin import HeteroPlugin, check_accelerator, switched_on
from lightning_hetero.comm.agreement.backends import compare_backends
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.data.streams.loaders import is_stream
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.joining import warn_of_stale_addresses
from lightning_hetero.frontend.model_setup import raise_minimum
from lightning_hetero.frontend.units.loaders import OWN_ONLY_IN_LIGHTNING, is_made_of_units, stand_in
from lightning_hetero.frontend.without_effect import tell, tell_left
from lightning_hetero.session import HeteroSession

__all__ = ["HeteroAccelerator"]

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class HeteroAccelerator(CollectivesAccelerator, CheckpointAccelerator):
    """Accelerate's ``Accelerator`` on unequal workers, with the gradients of one process.

    ``prepare`` splits the training loader by speed, ``backward`` weights the loss, and the split follows the measured
    times. The loader's ``batch_size`` keeps its meaning under ``Accelerator``. The training loader is the one that
    shuffles; without one, the first that is prepared together with an optimizer. All other loaders are left to
    Accelerate.

    Args:
        hetero_plugin: settings; by default those of the environment. ``ACCELERATE_USE_HETERO=false`` without a plugin
            makes this a plain ``Accelerator``.
        kwargs: arguments of ``Accelerator``.

    Raises:
        TypeError: if ``hetero_plugin`` is not a :class:`HeteroPlugin`, or a setting has the wrong type.
        ValueError: if a setting is out of range, the distributed type is not plain data parallelism on CPUs or GPUs, or
            Accelerate does not join the ``WORLD_SIZE`` processes that were started.

    Example:
        >>> accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(policy="pid"))
        >>> accelerator.hetero_plugin.policy
        'pid'
    """

    def __init__(self, *args: Any, hetero_plugin: HeteroPlugin | None = None, **kwargs: Any) -> None:
        check_accelerator(type(self), kwargs)
        if hetero_plugin is not None and not isinstance(hetero_plugin, HeteroPlugin):
            raise TypeError(
                f"hetero_plugin={hetero_plugin!r} is a {type(hetero_plugin).__name__}; give a HeteroPlugin."
            )
        if hetero_plugin is None and switched_on():
            hetero_plugin = HeteroPlugin()
        store: torch.distributed.Store | None = None  # kept until the group exists
        if hetero_plugin is not None and not torch.distributed.is_initialized():
            warn_of_stale_addresses(os.environ)
            store = _compare_backends(inspect.signature(Accelerator).bind_partial(*args, **kwargs).arguments)
        super().__init__(*args, **kwargs)
        del store
        self.hetero_plugin = hetero_plugin
        self._chosen: torch.utils.data.DataLoader | None = None
        self._metrics: dict[str, float] = {}
        if hetero_plugin is None:
            return
        parallel = getattr(self, "parallelism_config", None)  # since Accelerate 1.10
        if self.distributed_type not in PLAIN or parallel is not None:
            raise ValueError(
                f"distributed_type={self.distributed_type.value}, parallelism_config={parallel}: "
                "unequal batches are for plain data parallelism on CPUs or GPUs. Leave the other plugin out, or turn "
                "unequal batches off with ACCELERATE_USE_HETERO=false. For unequal batches of a sharded model (FSDP), "
                "use Lightning's Trainer(strategy='hetero_fsdp')."
            )
        launched = os.environ.get("WORLD_SIZE", "1")
        if self.num_processes == 1 and launched not in ("", "1"):
            raise ValueError(
                f"WORLD_SIZE={launched} processes were started, and Accelerate joins this one with none: each would "
                "train alone, all of them on the same samples. Without GPUs, set ACCELERATE_USE_CPU=true (or give "
                "--cpu to lightning-hetero launch); if this process is meant to be alone, unset WORLD_SIZE."
            )
        self._begin()

    def _begin(self) -> None:
        """Begin the session; a collective call."""
        assert self.hetero_plugin is not None
        engine = HeteroEngine(
            self.hetero_plugin,
            rank=self.process_index,
            world_size=self.num_processes,
            device=self.device,
            local_rank=self.local_process_index,
            timeout=None if self.init_handler is None else self.init_handler.timeout,
        )
        folder, front_end = self._record()
        self.hetero_session = HeteroSession(
            engine, on_metrics=self._keep_metrics, directory=folder, front_end=front_end
        )
        tell(engine, self.hetero_session.planner)
        self.ddp_handler = HookedDDP(self.ddp_handler or DistributedDataParallelKwargs(), self, engine)
        self.register_save_state_pre_hook(self._save_hetero)
        self.register_load_state_pre_hook(self._load_hetero)

    def _record(self) -> tuple[Path | None, str]:
        """Return the folder for the record of the run, and what runs the training loop."""
        return Path(self.logging_dir) if self.logging_dir else None, "Accelerate"

    # prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as ``Accelerator.prepare`` does; the training loader is split by speed."""
        if self._hetero_loader is None:
            self._chosen = self._training_loader(args)
        try:
            prepared = super().prepare(*args, device_placement=device_placement)
        finally:
            self._chosen = None
        if self.engine is not None and self.engine.compression is not None:
            self.engine.compression.bind_optimizers(wrapped.optimizer for wrapped in self._optimizers)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        uneven: bool | None = None,
    ) -> Any:
        """Prepare a loader as ``Accelerator.prepare_data_loader`` does, or split it by speed.

        Args:
            data_loader: loader to prepare.
            device_placement: whether its batches are moved to the device.
            slice_fn_for_dispatch: how batches are sliced with ``dispatch_batches=True``.
            uneven: whether to split it by speed; by default if it is the training loader.

        Raises:
            ValueError: if it is to be split and cannot be.
        """
        known = getattr(data_loader, "_is_accelerate_prepared", False)
        session, given = self.hetero_session, data_loader
        wanted = data_loader is self._chosen or (uneven is None and self._training_loader([data_loader]) is data_loader)
        wanted = wanted if uneven is None else uneven
        stream = is_stream(data_loader) and session is not None and session.engine.config.policy != "even"
        first = wanted and self._hetero_loader is None
        reason = None
        if not known and session is not None and first:
            reason = unsupported_reason(
                data_loader,
                dispatch=self.dispatch_batches,
                stateful=self.use_stateful_dataloader,
                policy=session.engine.config.policy,
            )
            given = stand_in(given, self.num_processes) if reason is None and is_made_of_units(given) else given
        with not_dispatched(self.dataloader_config) if first and stream else nullcontext():
            prepared = super().prepare_data_loader(given, device_placement, slice_fn_for_dispatch)
        if known or session is None:
            return prepared
        if wanted and not stream and session.engine.config.shard == "mine":
            raise ValueError(f"{OWN_ONLY_IN_LIGHTNING}.")
        if first:
            if reason is None:
                ranks, split = self.num_processes, self.split_batches
                if stream:
                    self._hetero_loader = uneven_stream(prepared, data_loader, session, ranks, split=split)
                else:
                    self._hetero_loader = uneven_loader(prepared, session, ranks, split=split, given=data_loader)
                self._dataloaders[-1] = self._hetero_loader
                return self._hetero_loader
            if uneven or session.engine.config.local_batch_sizes is not None:
                raise ValueError(f"{reason}, or leave the split to Accelerate with policy='even' and no sizes.")
            tell_left(session.engine, session.planner, f"{reason}. It is left to Accelerate, which splits it evenly.")
        elif wanted:
            text = "a second training loader is split evenly; only the first one is split by speed."
            session.engine.notices.say(text, loses=True)
        elif self._hetero_loader is None and self._chosen is None and uneven is None:
            session.engine.notices.say(
                "a loader that does not shuffle was prepared without an optimizer beside it: it is taken for an "
                "evaluation's and left to Accelerate. To split it by speed: prepare_data_loader(loader, uneven=True)."
            )
        self._dataloaders[-1] = announced_loader(prepared, session, lambda: self._models)
        return self._dataloaders[-1]

    def _training_loader(self, objects: Sequence[object]) -> torch.utils.data.DataLoader | None:
        """Return the loader among these that is split by speed."""
        return training_loader(objects)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model; with batch normalization, no rank gets a batch of one sample."""
        engine = self.engine
        if engine is not None and not evaluation_mode and raise_minimum(engine, model):
            self._session().reshard()
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        if isinstance(getattr(prepared, "_orig_mod", prepared), DistributedDataParallel) and engine is not None:
            self._session().watch(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer; its steps are timed, and their learning rate follows a total that moves."""
        prepared: Any = super().prepare_optimizer(optimizer, device_placement)
        if self.engine is not None:
            _TimedOptimizer.take_over(prepared, self.engine.observer)
            steps = self.gradient_state
            self._session().lead(
                [one.optimizer for one in self._optimizers], scaler=self.scaler, divisor=lambda: steps.num_steps
            )
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as ``Accelerator.free_memory`` does, and end the run; the next loader is split from scratch."""
        self._hetero_loader = None
        if self.hetero_session is not None:
            self.hetero_session.report.end()
        return super().free_memory(*objects)

    # one step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Weight the loss by this rank's share of the batch, then run backward."""
        engine = self.engine
        if engine is None:
            super().backward(loss, **kwargs)
            return
        weighted = engine.scale_loss(loss)  # may wait for other ranks' counts, outside the timed backward pass
        with engine.backward():
            super().backward(weighted, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as ``Accelerator.clip_grad_norm_`` does; of a sparse gradient, the blocks that were sent."""
        return super().clip_grad_norm_(self._clipped(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip as ``Accelerator.clip_grad_value_`` does; of a sparse gradient, the blocks that were sent."""
        super().clip_grad_value_(self._clipped(parameters), clip_value)

    def _clipped(self, parameters: Any) -> Any:
        compression = None if self.engine is None else self.engine.compression
        if compression is None:
            return parameters
        return compression.clip_targets([parameters] if isinstance(parameters, torch.Tensor) else parameters)

    # tracking

    def _keep_metrics(self, metrics: dict[str, float]) -> None:
        self._metrics.update(metrics)

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log as ``Accelerator.log`` does, with the newest ``hetero/...`` metrics added."""
        kept, self._metrics = self._metrics, {}
        super().log({**kept, **values}, step=step, log_kwargs=log_kwargs or {})

    def end_training(self) -> None:
        """Log the remaining metrics, then end training as ``Accelerator.end_training`` does."""
        if self._metrics and self.trackers:
            self.log({})
        if self.hetero_session is not None:
            self.hetero_session.close()
        super().end_training()


class _TimedOptimizer(AcceleratedOptimizer):
    """An optimizer that tells the observer when a step begins and ends."""

    observer: StepTimer

    @classmethod
    def take_over(cls, prepared: AcceleratedOptimizer, observer: StepTimer) -> None:
        """Turn an optimizer that Accelerate has prepared into one of this class."""
        prepared.__class__ = cls
        prepared.__dict__["observer"] = observer

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.observer.begin_update()
        super().step(closure)
        self.observer.end_update()


def _compare_backends(given: dict[str, Any]) -> torch.distributed.Store | None:
    """Compare the backends that the ranks' Accelerators, of these arguments, are about to choose; a collective call."""
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None  # of an MPI launch, or of one that Accelerate does not join
    handlers = [one for one in given.get("kwargs_handlers") or () if isinstance(one, InitProcessGroupKwargs)]
    chosen = handlers[0].to_kwargs() if handlers else {}
    on_cpu = given.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return compare_backends(
        chosen.get("backend") or ("gloo" if on_cpu else "nccl"),
        torch.device("cpu" if on_cpu else "cuda"),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=chosen.get("timeout"),
    )
