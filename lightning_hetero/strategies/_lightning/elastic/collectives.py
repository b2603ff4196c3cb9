"""Lightning's collectives under elastic averaging: allowed between two mega-batches only."""

from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_hetero.elastic import ElasticEngine
from lightning_hetero.frontend.collectives import exact_mean
from lightning_hetero.strategies._lightning.ending import AloneMixin

__all__ = ["ElasticCollectivesMixin"]

T = TypeVar("T")


class ElasticCollectivesMixin(AloneMixin):
    """DDP's collectives, refused inside a mega-batch, where ranks train on unequal numbers of batches."""

    engine: ElasticEngine | None

    def reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> torch.Tensor:
        """Reduce as DDP does, between mega-batches only; a mean of integers is exact."""
        self._require_merged("reducing a value over ranks (self.log with sync_dist=True and on_step=True?)")
        return super().reduce(exact_mean(tensor, reduce_op), group, reduce_op)

    def barrier(self, *args: object, **kwargs: object) -> None:
        """Wait for all ranks, between mega-batches only."""
        self._require_merged("a barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast as DDP does, between mega-batches only."""
        self._require_merged("a broadcast")
        return super().broadcast(obj, src)

    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather as DDP does, between mega-batches only."""
        self._require_merged("an all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @property
    def _told_together(self) -> bool:
        return self.world_size == 1 or self._trainer.received_sigterm  # set at a merge

    def _require_merged(self, what: str) -> None:
        if self.engine is not None and not self._alone:
            self.engine.require_merged(what)
