"""Put our communication hook, around the user's own, into the DDP arguments with which Accelerate wraps a model."""

import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs

from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.wrap_model import WrappedModel

__all__ = ["HookedDDP"]


class HookedDDP(DistributedDataParallelKwargs):
    """The user's DDP arguments, with our communication hook around theirs; a model can have only one.

    Args:
        given: arguments of the user, whose ``comm_hook`` runs inside ours.
        accelerator: whose models are wrapped; it is not kept alive.
        engine: of its run.
    """

    def __init__(self, given: DistributedDataParallelKwargs, accelerator: Any, engine: HeteroEngine) -> None:
        self.given, self.engine = given, engine
        self.accelerator = weakref.ref(accelerator)
        self.wrapped: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return copy, (self.given,)  # the hook belongs to this run

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of DDP, those of the user."""
        return self.given.to_kwargs()  # type: ignore[no-any-return]

    def register_comm_hook(self, model: Any) -> None:
        """Register our hook with a model that DDP has wrapped."""
        self.wrapped.add(model)
        WrappedModel(model, self.engine, self._attach, lambda: getattr(self.accelerator(), "_optimizers", ()))

    def _attach(self, model: Any) -> None:
        state, compression, taken = self.engine.hook_state, self.engine.compression, _TakenHook()
        self.given.register_comm_hook(taken)
        if taken.hook is not None and compression is not None:
            raise ValueError("compression= and a comm_hook both say what is sent of gradients. Give one of them.")
        state.use_hook(taken.hook, taken.state)
        scaler = getattr(self.accelerator(), "scaler", None)
        self.engine.health.attach(model.module, scaled=scaler is not None)
        if compression is not None:
            scale = None if scaler is None else scaler.get_scale
            compression.attach(model.module, grad_scale=scale, hold_unused=model.find_unused_parameters)


class _TakenHook:
    """Stands in for a model, to learn which hook would be registered with it."""

    hook: Any = None
    state: Any = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook
