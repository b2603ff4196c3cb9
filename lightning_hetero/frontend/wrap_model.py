"""The DDP wrapper of a model with our hook, which follows a change of the parameters that are trained.

DDP knows the parameters that need a gradient when it wraps the model. One that is unfrozen later gets each rank's own
gradient and no average, so that replicas drift apart; one that is frozen is waited for in vain. So the wrapper looks at
the parameters before each forward pass, and where they have changed DDP lays its buckets out anew, in place.
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

from lightning_hetero.comm.gradients.ddp_hook import gradient_hook
from lightning_hetero.comm.gradients.requirements import check_rescaled, check_sparse_gradients
from lightning_hetero.engine import HeteroEngine

__all__ = ["Unwatched", "WrappedModel"]

log = logging.getLogger("lightning_hetero")

_needs_gradient = attrgetter("requires_grad")


class WrappedModel:
    """Registers our hook with a model under DDP, and again whenever other parameters are trained than before.

    Args:
        model: as DDP has wrapped it, without a hook.
        engine: whose hook it is.
        attach: puts compression and staleness of the module's trained parameters into the state of the hook.
        optimizers: optimizers of the model, as far as there are any by now: by those, parameters are found that were
            added to the model.

    Raises:
        ValueError: if the model has sparse gradients, which the settings have no form for, or embeddings with
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
        self._follow = torch.compiler.disable(self._wrap_anew)  # the forward pass may be a compiled one
        self._connect(model)
        model.register_forward_pre_hook(self)
        engine.models[model.module] = self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leave nothing of this run in a copy or a pickle of the model."""
        return Unwatched, ()

    def _connect(self, model: DistributedDataParallel) -> None:
        """Put the hook into DDP, which has just laid out its buckets."""
        self.attach(model)
        if self.engine.world_size > 1:
            check_rescaled(model.module)
        check_sparse_gradients(model.module, self.engine.config, self.engine.hook_state.averager.user_hook)
        model.register_comm_hook(self.engine.hook_state, gradient_hook)
        self._parameters = list(model.module.parameters())
        self._flags = self._flags_now()
        self._known = self._in_optimizers()
        self._wrapped = {p for p in self._parameters if p.requires_grad}

    def _flags_now(self) -> list[bool]:
        return list(map(_needs_gradient, self._parameters))

    def _in_optimizers(self) -> int:
        return sum(len(group["params"]) for one in self.optimizers() for group in one.param_groups)

    # what has changed

    def __call__(self, model: Any, inputs: Any) -> None:
        """Let DDP know all parameters that need a gradient by now; a collective call where that has changed."""
        if not torch.is_grad_enabled():
            return
        number = self._in_optimizers()
        if number == self._known and self._flags_now() == self._flags:
            return
        self._parameters, self._known = list(model.module.parameters()), number
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
        if engine.put_back is not None:  # deferred updates go to the weights as they are
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
        """Average what an accumulation window holds of parameters that are frozen in it, which DDP will not."""
        there = dict(model.module.named_parameters())
        held = self.engine.control.gather_objects([name for name in frozen if there[name].grad is not None])
        for name in frozen:
            if any(name in names for names in held):
                p = there[name]
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                dist.all_reduce(p.grad.mul_(1.0 / self.engine.world_size), group=model.process_group)

    def after_backward(self) -> None:
        """Make sure that no gradient has come in that DDP does not know of.

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
    """Stand-in for a :class:`WrappedModel` in the copy of a model: torch registers no hook with a copy either."""

    def __call__(self, model: Any, inputs: Any) -> None:
        """Leave the copy to torch."""


def _lay_out_anew(model: DistributedDataParallel) -> None:
    """Replace what DDP has made for the parameters that were trained when it wrapped the model.

    It is what DDP does when it is unpickled. Hooks of the old reducer leave the parameters with it.
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
