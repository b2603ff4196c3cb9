"""The gradient as an adaptive optimizer sees it, for the noise scale (Pollux, sec. 3.1)."""

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["AdamPreconditioner", "is_adam"]


def is_adam(optimizer: Any) -> bool:
    """Whether an optimizer keeps the second moments of Adam.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(1))]
        >>> is_adam(torch.optim.AdamW(weights)), is_adam(torch.optim.SGD(weights, lr=0.1))
        (True, False)
    """
    name = type(optimizer).__name__.lower()
    return "betas" in optimizer.defaults and "adam" in name and "adamax" not in name


class AdamPreconditioner:
    """Divides a gradient by ``sqrt(v / (1 - beta_2^t)) + eps``, with Adam's second moment ``v`` before this step.

    What Adam does with noise is not what SGD does with it: coordinates of small gradients are scaled up. The noise
    scale that counts is that of the preconditioned gradient, ``tr(P Sigma P) / |P G|^2`` with ``P`` the diagonal matrix
    of these divisors' inverses. With AMSGrad ``v`` is the largest so far. A parameter without a second moment yet
    counts as zero. No gradient is kept.

    Args:
        optimizers: optimizers of the Adam family.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> adam = torch.optim.Adam([weight])
        >>> weight.grad = torch.tensor([4.0])
        >>> adam.step()
        >>> round(AdamPreconditioner([adam])(weight, torch.tensor([8.0])).item(), 3)
        2.0
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = tuple(optimizers)
        self._homes: dict[torch.Tensor, tuple[Any, int]] = {}

    def _home(self, parameter: torch.Tensor) -> tuple[Any, int] | None:
        """Optimizer of a parameter and the number of its group; groups may be added while training goes on."""
        if parameter not in self._homes:
            self._homes = {
                parameter: (optimizer, number)
                for optimizer in self._optimizers
                for number, group in enumerate(optimizer.param_groups)
                for parameter in group["params"]
            }
        return self._homes.get(parameter)

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The preconditioned gradient, of the shape of ``gradient``."""
        home = self._home(parameter)
        known = {} if home is None else home[0].state.get(parameter, {})
        if home is None or "exp_avg_sq" not in known:
            return torch.zeros_like(gradient)
        group = home[0].param_groups[home[1]]
        used = known.get("max_exp_avg_sq", known["exp_avg_sq"])
        moment = used / (1 - group["betas"][1] ** known["step"])
        return gradient / moment.sqrt().add_(group["eps"]).view_as(gradient)
