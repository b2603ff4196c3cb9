"""A factor on the scheduled learning rate, for the duration of each optimizer step."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["LearningRateGain", "LearningRateMultiplier"]

Closure = Callable[[], Any]


@checked_keywords
class LearningRateMultiplier:
    """Factor on the learning rate of every parameter group, applied only while the optimizer steps.

    Between steps the scheduled rate is in place. So the factor works with any scheduler, with warm-up, several groups
    and gradient scalers, and is in no checkpoint of the optimizer. A closure, in which Lightning runs
    ``training_step``, sees the scheduled rates, too; rates that it sets are multiplied as well.

    Args:
        optimizers: optimizers to act on.
        gain: returns the factor of the current step, above 0.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> multiplier = LearningRateMultiplier([optimizer], lambda: 2.0)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(weight.item(), 6), optimizer.param_groups[0]["lr"], multiplier.steps
        (-0.2, 0.1, 2.0)
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], gain: Callable[[], float]) -> None:
        self.steps = 0.0
        """AdaScale's scale-invariant step count, the sum of the factors over the steps of the first optimizer."""
        self._gain = gain
        self._scheduled: dict[int, list[Any]] = {}
        self._handles: list[RemovableHandle] = []
        self._optimizers = list(optimizers)
        for number, optimizer in enumerate(self._optimizers):
            before = optimizer.register_step_pre_hook(self._before)
            # First of the hooks: steps that others append to the user's closure, such as sparse ones, need the factor.
            hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
            hooks.move_to_end(before.id, last=False)
            self._handles.append(before)
            self._handles.append(optimizer.register_step_post_hook(self._after if number else self._after_first))

    def remove(self) -> None:
        """Let go of the optimizers, with their scheduled rates restored, even after a step that failed halfway."""
        for optimizer in self._optimizers:
            self._restore(optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._scheduled.pop(id(optimizer), ()), strict=False):
            group["lr"] = rate

    def _multiply(self, optimizer: torch.optim.Optimizer, gain: float) -> None:
        self._scheduled[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * gain

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._restore(optimizer)  # a step that raised has left its factor
        gain = self._gain()
        if gain == 1.0:
            return None
        self._multiply(optimizer, gain)

        def with_scheduled_rates(closure: Closure) -> Closure:
            def evaluate() -> Any:
                self._restore(optimizer)
                result = closure()
                self._multiply(optimizer, gain)
                return result

            return evaluate

        # The optimizer comes first among the arguments, then its closure, if there is one.
        args = (*args[:1], *(with_scheduled_rates(value) if callable(value) else value for value in args[1:]))
        given = kwargs.get("closure")
        return args, {**kwargs, "closure": with_scheduled_rates(given)} if given is not None else kwargs

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._restore(optimizer)

    def _after_first(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._restore(optimizer)
        self.steps += self._gain()


LearningRateGain = LearningRateMultiplier
"""Name in earlier versions."""
