"""Norms of gradients on the device, one small tensor each; no gradient is copied."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

__all__ = ["GradientNorms", "norm"]


@dataclass
class GradientNorms:
    """Takes norms, of gradients as the optimizer scales them and without the factor of a gradient scaler.

    Args:
        preconditioner: ``(parameter, gradient) -> gradient``, applied first, to one parameter after the other.
        loss_scale: gives the factor on the loss of a gradient scaler, as a number or on the device.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> GradientNorms().of_parameters([weight])
        [tensor(5.)]
    """

    preconditioner: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    loss_scale: Callable[[], torch.Tensor | float] | None = None

    def of_bucket(self, flat: torch.Tensor, parameters: Callable[[], list[torch.Tensor]]) -> torch.Tensor:
        """Norm of a bucket, whose parameters lie one after the other in it."""
        if self.preconditioner is None:
            return self._unscaled(norm(flat))
        owners = parameters()
        parts = flat.view(-1).split([owner.numel() for owner in owners])
        pairs = ((p, _laid_out_as(p, part)) for p, part in zip(owners, parts, strict=True))
        return self._unscaled(norm(torch.stack([norm(self.preconditioner(p, part)) for p, part in pairs])))

    def of_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Norm of all gradients that lie in the parameters; nothing if there are none."""
        seen = [(p, p.grad) for p in parameters if p.grad is not None]
        if not seen:
            return []
        if self.preconditioner is None:
            norms = list(torch._foreach_norm([gradient for _, gradient in seen]))
        else:
            norms = [norm(self.preconditioner(p, gradient)) for p, gradient in seen]
        return [self._unscaled(norm(torch.stack(norms)))]

    def _unscaled(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.loss_scale is None else value / self.loss_scale()


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Euclidean norm, of 16-bit values in float32."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    return torch.linalg.vector_norm(tensor.detach(), dtype=None if wide else torch.float32)


def _laid_out_as(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient in a bucket, where DDP keeps the parameter's own order in memory (channels last, say)."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return (
        part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
        if dense
        else part.view_as(parameter)
    )
