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
    return "betas" in optimizer.defaults and "adam" in type(optimizer).__name__.lower()


class AdamPreconditioner:
    """Divides a gradient by ``sqrt(v / (1 - beta_2^t)) + eps``, with Adam's second moment ``v`` before this step.

    What Adam does with noise is not what SGD does with it: coordinates of small gradients are scaled up. The noise
    scale that counts is that of the preconditioned gradient, ``tr(P Sigma P) / |P G|^2`` with ``P`` the diagonal matrix
    of these divisors' inverses. A parameter without a second moment yet counts as zero. Nothing is kept.

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
        self._homes = {
            parameter: (optimizer.state, group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The preconditioned gradient, of the shape of ``gradient``."""
        state, group = self._homes.get(parameter, ({}, {}))
        known = state.get(parameter, {})
        if "exp_avg_sq" not in known:
            return torch.zeros_like(gradient)
        moment = known["exp_avg_sq"] / (1 - group["betas"][1] ** known["step"])
        return gradient / moment.sqrt().add_(group["eps"]).view_as(gradient)
