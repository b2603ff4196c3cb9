"""Weight of each rank's loss: where the loss enters backward is the one place at which weighting is exact.

Weighting gradient buckets instead is wrong as soon as an operation inside the model crosses ranks (synchronised batch
normalisation, gathered contrastive losses) and for micro-batches of different sizes in one accumulation window.
"""

from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.config import HeteroConfig

__all__ = ["LossWeighting"]


class LossWeighting:
    """Scales the loss by ``W b_i / B``, so that DDP's mean over ``W`` ranks is the mean over ``B`` samples (eq. 9).

    With ``weight_fn`` the counts ``n_i`` of the batches (tokens, pixels) take the place of ``b_i``; they are summed
    over ranks while the forward pass runs. A sum-reduced loss has weight 1. A rank whose share is 0 has weight 0.

    Args:
        config: ``loss_reduction`` and ``weight_fn``.
        world_size: number of ranks.
        device: where counts are summed.

    Example:
        >>> weighting = LossWeighting(HeteroConfig(), world_size=2, device=torch.device("cpu"))
        >>> weighting.begin(own=6, total=8, batch=None)
        >>> float(weighting.scale(torch.tensor(1.0)))
        1.5
    """

    def __init__(self, config: HeteroConfig, world_size: int, device: torch.device) -> None:
        self.config, self.world_size, self.device = config, world_size, device
        self._weight: float | torch.Tensor = 1.0
        self._count: tuple[torch.Tensor, torch.Tensor, Any] | None = None

    def begin(self, own: int, total: int, batch: Any) -> None:
        """Take the weight of a batch of ``own`` out of ``total`` samples; a collective call with ``weight_fn``."""
        self._count = None
        if self.config.weight_fn is not None:
            self._count = self._sum_counts(self.config.weight_fn(batch) if own else 0.0)
        elif self.config.loss_reduction == "sum":
            self._weight = 1.0 if own else 0.0
        else:
            self._weight = self.world_size * own / total

    @property
    def waits(self) -> bool:
        """Whether :meth:`scale` may have to wait for the counts of other ranks."""
        return self._count is not None

    def reset(self) -> None:
        """Losses that come now belong to no batch: they have weight 1."""
        self._weight, self._count = 1.0, None

    def _sum_counts(self, count: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Start adding up the counts of all ranks; the sum is needed only when backward begins."""
        count = count.detach() if isinstance(count, torch.Tensor) else count
        if isinstance(count, torch.Tensor) and count.device.type != "cpu":
            own = count.to(self.device, torch.float64).reshape(())
        else:  # a kernel fills it in its turn; a copy from the host would wait for all that the device has yet to do
            own = torch.full((), float(count), dtype=torch.float64, device=self.device)
        total = own.clone()
        return own, total, dist.all_reduce(total, async_op=True) if self.world_size > 1 else None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The weighted loss; the very same tensor where the weight is 1."""
        if self._count is not None:
            own, total, work = self._count
            if work is not None:
                work.wait()
            share = torch.where(total > 0, own / total.clamp(min=1e-300), torch.zeros_like(total))
            self._weight, self._count = (self.world_size * share).to(loss.dtype), None
        if isinstance(self._weight, float) and self._weight == 1.0:
            return loss
        return loss * self._weight
