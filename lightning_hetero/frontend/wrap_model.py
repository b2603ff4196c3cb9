"""The DDP wrapper of a model with our hook, which follows changes of the set of trained parameters.

DDP records the parameters that need a gradient when it wraps the model. If one is unfrozen later, each rank keeps its
own gradient of it without an average, and replicas drift apart; for one that is frozen later, DDP waits in vain. So the
wrapper checks the parameters before each forward pass, and on a change makes DDP rebuild its buckets, in place.
"""

import logging
import weakref
import zlib
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.agreement.group_lifetime import free_group_last
from lightning_hetero.comm.gradients.buffer_sync import time_buffers
from lightning_hetero.comm.gradients.ddp_hook import gradient_hook
from lightning_hetero.comm.gradients.requirements import check_rescaled, check_sparse_gradients
from lightning_hetero.engine import HeteroEngine

__all__ = ["Unwatched", "WrappedModel"]

log = logging.getLogger("lightning_hetero")

_needs_gradient = attrgetter("requires_grad")


class WrappedModel:
    """Model under DDP with our hook, which is registered again whenever the set of trained parameters changes.

    Args:
        model: model that DDP has wrapped, without a hook.
        engine: engine of the hook.
        attach: sets up compression and staleness of the trained parameters in the state of the hook.
        optimizers: returns the optimizers of the model, as far as there are any by now; they show parameters that were
            added to the model.

    Attributes:
        parameters: parameters of the model, frozen ones among them.

    Raises:
        ValueError: if the model has sparse gradients that the settings do not support, or embeddings with
            ``max_norm``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        engine: HeteroEngine,
        attach: Callable[[DistributedDataParallel], None],
        optimizers: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.engine, self.attach, self.optimizers = engine, attach, optimizers
        self.changes = 0
        self._model = weakref.ref(model)
        self._follow = torch.compiler.disable(self._wrap_anew)  # the forward pass may be compiled
        self._connect(model)
        time_buffers(model, engine.observer)
        model.register_forward_pre_hook(self)
        engine.models[model.module] = self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Keep this run out of a copy or a pickle of the model."""
        return Unwatched, ()

    def _connect(self, model: DistributedDataParallel) -> None:
        """Put the hook into DDP, which has just laid out its buckets."""
        self.attach(model)
        if self.engine.world_size > 1:
            check_rescaled(model.module)
        check_sparse_gradients(model.module, self.engine.config, self.engine.hook_state.averager.user_hook)
        model.register_comm_hook(self.engine.hook_state, gradient_hook)
        free_group_last(model)
        self.parameters = list(model.module.parameters())
        self._flags = self._flags_now()
        self._known = self._in_optimizers()
        self._wrapped = {p for p in self.parameters if p.requires_grad}

    def _flags_now(self) -> list[bool]:
        return list(map(_needs_gradient, self.parameters))

    def _in_optimizers(self) -> int:
        return sum(len(group["params"]) for one in self.optimizers() for group in one.param_groups)

    # what has changed

    def __call__(self, model: Any, inputs: Any) -> None:
        """Tell DDP which parameters need a gradient now; a collective call if that has changed."""
        if not torch.is_grad_enabled():
            return
        number = self._in_optimizers()
        if number == self._known and self._flags_now() == self._flags:
            return
        self.parameters, self._known = list(model.module.parameters()), number
        self._flags = self._flags_now()
        trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        new = [name for name, p in trained.items() if p not in self._wrapped]
        frozen = [n for n, p in model.module.named_parameters() if p in self._wrapped and not p.requires_grad]
        if trained and (new or (frozen and not model.find_unused_parameters)):
            self._follow(model, trained, new, frozen)

    def _wrap_anew(
        self, model: DistributedDataParallel, trained: dict[str, torch.Tensor], new: list[str], frozen: list[str]
    ) -> None:
        engine = self.engine
        names = zlib.crc32("\n".join(trained).encode())
        engine.control.require_equal("what is trained", f"{len(trained)} parameters, names {names:08x}")
        reason = engine.hook_state.averager.unsupported_reason()
        if reason is not None:
            raise ValueError(
                f"{len(new)} parameters were unfrozen and {len(frozen)} frozen in the training, and {reason}"
            )
        if engine.put_back is not None:  # deferred updates belong to the unpredicted weights
            engine.put_back()
        for name in new:
            dist.broadcast(trained[name].detach(), 0, group=model.process_group)
        self._average(model, frozen)
        blocks = None if engine.compression is None else engine.compression.blocks
        density = None if blocks is None else blocks.density
        _lay_out_anew(model)
        self._connect(model)
        if engine.compression is not None:
            engine.compression.set_density(density)
        if engine.noise is not None:
            engine.noise.begin_anew()
        engine.observer.discard()
        self.changes += 1
        if engine.rank == 0 and self.changes & (self.changes - 1) == 0:
            log.info(
                "other parameters are trained from now on: %d new%s, %d frozen, %d in all. DDP has laid out its "
                "buckets anew (change %d)",
                len(new),
                f" ({new[0]}, ...)" if new else "",
                len(frozen),
                len(trained),
                self.changes,
            )

    def _average(self, model: DistributedDataParallel, frozen: list[str]) -> None:
        """Average the accumulated gradients of parameters that were frozen inside a window, which DDP does not do."""
        there = dict(model.module.named_parameters())
        held = self.engine.control.gather_objects([name for name in frozen if there[name].grad is not None])
        for name in frozen:
            if any(name in names for names in held):
                p = there[name]
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                dist.all_reduce(p.grad.mul_(1.0 / self.engine.world_size), group=model.process_group)

    def after_backward(self) -> None:
        """Check that no parameter has a gradient that DDP does not know of.

        Raises:
            RuntimeError: if a parameter was unfrozen between a forward pass and its backward pass.
        """
        if self._flags_now() == self._flags:
            return
        model = self._model()
        named = () if model is None else model.module.named_parameters()
        strange = [n for n, p in named if p.requires_grad and p.grad is not None and p not in self._wrapped]
        if strange:
            raise RuntimeError(
                f"{strange[0]} and {len(strange) - 1} more parameters were unfrozen inside of a training step, where "
                "their gradients are not averaged over ranks. Unfreeze them between two steps, in "
                "on_train_batch_start for example."
            )


class Unwatched:
    """Stand-in for a :class:`WrappedModel` in a copy of the model, with which torch registers no hook either."""

    def __call__(self, model: Any, inputs: Any) -> None:
        """Do nothing: the copy is torch's."""


def _lay_out_anew(model: DistributedDataParallel) -> None:
    """Make DDP rebuild its buckets for the parameters that are trained now.

    It is what DDP does when it is unpickled. The hooks of the old reducer leave the parameters with it.
    """
    try:
        state = model.__getstate__()
    except RuntimeError as error:
        raise ValueError(
            "parameters were frozen or unfrozen in the training, and DDP has a process_group of its own, with which it "
            "cannot be laid out anew. Leave process_group out, or freeze and unfreeze between two trainings."
        ) from error
    state.get("_comm_hooks", []).clear()
    del model.reducer, model.logger
    model.__setstate__(state)
