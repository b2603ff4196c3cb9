"""The gradient as an adaptive optimizer scales it, for the noise scale (Pollux, sec. 3.1)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lightning_hetero.core.keywords import checked_keywords

__all__ = ["AdamPreconditioner", "common_preconditioner", "is_adam"]


@dataclass(frozen=True)
class PieceSizes:
    """Elements to process at a time.

    Args:
        host: on a CPU: half a megabyte in float32, which stays in a processor's cache.
        device: elsewhere. Gradient callbacks alternate between 32 streams, each of which keeps the memory of its
            temporaries; with whole parameters, these took up to 32 times the largest one.
    """

    host: int = 2**17
    device: int = 2**20


PIECES = PieceSizes()

FORMATS = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}
"""Memory formats in which a tensor of each number of dimensions can lie without gaps."""


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps the second moments of Adam.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(1))]
        >>> is_adam(torch.optim.AdamW(weights)), is_adam(torch.optim.SGD(weights, lr=0.1))
        (True, False)
    """
    name = type(optimizer).__name__.lower()
    return "betas" in optimizer.defaults and "adam" in name and "adamax" not in name


@checked_keywords
class AdamPreconditioner:
    """Preconditioner that divides a gradient by ``sqrt(v / (1 - beta_2^t)) + eps``, with ``v`` from before this step.

    ``v`` is Adam's second moment. Unlike SGD, Adam scales up coordinates with small gradients, and the noise in them.
    So the noise scale that counts is that of the preconditioned gradient, ``tr(P Sigma P) / |P G|^2``, where ``P`` is
    the diagonal matrix of the inverse divisors. With AMSGrad, ``v`` is the largest so far. A parameter without a second
    moment counts as zero. No gradient is kept.

    Args:
        optimizers: optimizers of the Adam family.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> adam = torch.optim.Adam([weight])
        >>> weight.grad = torch.tensor([4.0])
        >>> adam.step()
        >>> round(AdamPreconditioner([adam])(weight, torch.tensor([8.0])).item(), 3)
        2.0
        >>> [round(square.item(), 3) for square in AdamPreconditioner([adam]).squares(weight, torch.tensor([8.0]))]
        [4.0]
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._homes: dict[torch.Tensor, tuple[torch.optim.Optimizer, int]] = {}

    def _home(self, parameter: torch.Tensor) -> tuple[torch.optim.Optimizer, int] | None:
        """Return the optimizer of a parameter and the index of its group; groups may be added during training."""
        if parameter not in self._homes:
            self._homes = {
                parameter: (optimizer, number)
                for optimizer in self._optimizers
                for number, group in enumerate(optimizer.param_groups)
                for parameter in group["params"]
            }
        return self._homes.get(parameter)

    def _moment(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return ``v``, ``1 - beta_2^t`` and ``eps``; ``None`` before the first step."""
        home = self._home(parameter)
        known = {} if home is None else home[0].state.get(parameter, {})
        if home is None or "exp_avg_sq" not in known:
            return None
        group = home[0].param_groups[home[1]]
        used = known.get("max_exp_avg_sq", known["exp_avg_sq"])
        return used, 1 - group["betas"][1] ** known["step"], group["eps"]

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the preconditioned gradient, in the shape of ``gradient``."""
        known = self._moment(parameter)
        if known is None:
            return torch.zeros_like(gradient)
        used, bias, eps = known
        return gradient / (used / bias).sqrt().add_(eps).view_as(gradient)

    def squares(self, parameter: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the squared norm of the preconditioned gradient, in pieces, so that temporaries stay small.

        Sums of 16-bit values are in float32; for a parameter without a second moment the list is empty.
        """
        known = self._moment(parameter)
        if known is None:
            return []
        used, bias, eps = known
        shift, out = eps * bias**0.5, []
        for moment, part in _pieces(used, gradient):
            wide = moment if moment.dtype in (torch.float32, torch.float64) else moment.float()
            divisor = wide.sqrt().add_(shift)
            divided = torch.div(part, divisor, out=divisor).reshape(-1)
            out.append(torch.dot(divided, divided))
        return [torch.stack(out).sum() * bias]


def common_preconditioner(optimizers: Iterable[torch.optim.Optimizer]) -> AdamPreconditioner | None:
    """Return the preconditioner of optimizers of the Adam family; ``None`` if one is not, or there is none.

    Example:
        >>> common_preconditioner([torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)]) is None
        True
    """
    given = tuple(optimizers)
    return AdamPreconditioner(given) if given and all(map(is_adam, given)) else None


def _pieces(moment: torch.Tensor, gradient: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return both tensors in flat pieces if they lie in memory without gaps and in the same order, else unchanged."""
    dense = any(moment.is_contiguous(memory_format=f) for f in FORMATS.get(moment.ndim, (torch.contiguous_format,)))
    if not dense or moment.stride() != gradient.stride():
        return [(moment, gradient)]
    size = PIECES.host if moment.device.type == "cpu" else PIECES.device
    flat = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (moment, gradient))
    return zip(*(tensor.split(size) for tensor in flat), strict=True)
