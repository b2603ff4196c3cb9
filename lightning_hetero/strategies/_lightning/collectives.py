"""Collectives of a Lightning strategy whose ranks have unequal batches."""

from functools import partial

import torch
import torch.distributed as dist

from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.collectives import exact_mean, gather_unequal, not_computing
from lightning_hetero.strategies._lightning.base import LightningMixin

__all__ = ["CollectivesMixin"]


class CollectivesMixin(LightningMixin):
    """DDP's collectives; waiting in them does not count as computing."""

    engine: HeteroEngine | None

    def reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> torch.Tensor:
        """Reduce as DDP does, but take the exact mean of integers: size counters of logged means are integers."""
        with not_computing(self.engine):
            return super().reduce(exact_mean(tensor, reduce_op), group, reduce_op)

    def barrier(self, *args: object, **kwargs: object) -> None:
        """Wait for all ranks."""
        with not_computing(self.engine):
            super().barrier(*args, **kwargs)

    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather as DDP does; unequal numbers of rows are concatenated rank by rank, see :func:`gather_rows`."""
        stacked = partial(super().all_gather, group=group, sync_grads=sync_grads)
        return gather_unequal(self.engine, tensor, stacked, group)
