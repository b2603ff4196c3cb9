"""DDP arguments with which Accelerate wraps a model, with our communication hook around the user's own."""

import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.model_setup import attach_module, loss_scaler
from lightning_hetero.frontend.wrap_model import WrappedModel

__all__ = ["HookedDDP"]


class HookedDDP(DistributedDataParallelKwargs):
    """The user's DDP arguments, with our communication hook around theirs, because a model can have only one.

    Args:
        given: arguments of the user, whose ``comm_hook`` runs inside ours.
        accelerator: accelerator whose models are wrapped; held weakly.
        engine: engine of its run.
    """

    def __init__(self, given: DistributedDataParallelKwargs, accelerator: Accelerator, engine: HeteroEngine) -> None:
        self.given, self.engine = given, engine
        self.accelerator = weakref.ref(accelerator)
        self.wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return copy, (self.given,)  # the hook belongs to this run

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DDP, those of the user."""
        arguments: dict[str, Any] = self.given.to_kwargs()
        return arguments

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register our hook with a model that DDP has wrapped."""
        self.wrapped.add(model)
        WrappedModel(model, self.engine, self._attach, self._optimizers)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        accelerator = self.accelerator()
        return [] if accelerator is None else accelerator._optimizers

    def _attach(self, model: DistributedDataParallel) -> None:
        taken = _TakenHook()
        self.given.register_comm_hook(taken)
        if taken.hook is not None and self.engine.compression is not None:
            raise ValueError("compression= and a comm_hook both say what is sent of gradients. Give one of them.")
        self.engine.hook_state.use_hook(taken.hook, taken.state)
        attach_module(self.engine, model, loss_scaler(self.accelerator()))


class _TakenHook:
    """Stand-in for a model that records which hook is registered with it."""

    hook: Callable[..., Any] | None = None
    state: object = None

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.state, self.hook = state, hook
