"""Steps whose gradient is not finite: left out on all ranks together, and logged."""

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["DroppedSteps", "StepSkipper", "all_finite", "clear"]

log = logging.getLogger("lightning_hetero")


class DroppedSteps:
    """Number of steps that were left out so far."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, step: int, where: str) -> None:
        """Count one more step; the 1st, 2nd, 4th, 8th, ... are logged."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            log.warning(
                "a gradient was not finite in step %d %s: all ranks left that gradient out (%d so far)",
                step,
                where,
                self.count,
            )


class StepSkipper:
    """Makes optimizers skip the next step of parameters: these, and the optimizer's own state, stay as they are.

    An optimizer skips a parameter without a gradient. Gradients that were left out are zeros, and are taken away only
    after a closure and all that runs in it: whoever looks at them there, such as Lightning's hooks, finds the zeros. A
    gradient that is not zero by then is of an earlier step and comes late, or of another backward pass.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.AdamW([p], weight_decay=0.1)
        >>> skipper = StepSkipper()
        >>> p.grad = torch.zeros(1)
        >>> skipper.skip([p])
        >>> optimizer.step()
        >>> p.item(), len(optimizer.state)
        (1.0, 0)
        >>> skipper.remove()
    """

    def __init__(self) -> None:
        self._left_out: dict[int, torch.Tensor] = {}
        _listen()
        _skippers.add(self)

    def remove(self) -> None:
        """Let optimizers take all steps from now on."""
        _skippers.discard(self)

    def skip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Skip the next step of those that have a gradient, which was left out."""
        self._left_out.update((id(p), p) for p in parameters if p.grad is not None)

    def withhold(self, optimizer: torch.optim.Optimizer) -> None:
        """Take away the gradients of an optimizer that were left out."""
        held = (self._left_out.pop(id(p), None) for group in optimizer.param_groups for p in group["params"])
        own = [p for p in held if p is not None]
        if not any(bool(gradient.any()) for gradient in _given(own)):
            for p in own:
                p.grad = None


_skippers: weakref.WeakSet[StepSkipper] = weakref.WeakSet()


@functools.cache
def _listen() -> None:
    """Hear of the steps of all optimizers from now on.

    The hook stays: taking it off, which garbage collection might do at any moment, fails while an optimizer goes
    through its hooks.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take gradients away now, or after the user's closure, which may compute them."""
    if not _skippers:
        return None

    def withhold() -> None:
        for skipper in list(_skippers):
            skipper.withhold(optimizer)

    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        withhold()
        return None

    def closure_and_ours() -> Any:
        loss = closure()
        withhold()
        return loss

    return args[:1], {**kwargs, "closure": closure_and_ours}


def all_finite(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the sum of all gradients is finite: a single read from the device.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([1.0, float("nan")])
        >>> all_finite([p])
        False
    """
    wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in _given(parameters)]
    sums = [gradient.sum(dtype=dtype) for gradient, dtype in zip(_given(parameters), wide, strict=True)]
    return not sums or bool(torch.isfinite(torch.stack([s.to(sums[0].device) for s in sums]).sum()))


def clear(parameters: Iterable[torch.Tensor]) -> None:
    """Set the gradients to 0."""
    for gradient in _given(parameters):
        gradient.zero_()


def _given(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
