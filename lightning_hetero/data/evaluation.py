"""Evaluation shards by speed: no sample twice, and the same number of steps on every rank.

``DistributedSampler`` repeats samples to make shards equal, which falsifies metrics. Here the global batches differ by
at most one sample: every rank has at least one sample in every step, and none has to be repeated.
"""

from collections.abc import Callable, Iterator, Sequence

from torch.utils.data import Sampler

from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.keywords import checked_keywords

__all__ = ["EvaluationBatchSampler"]


@checked_keywords
class EvaluationBatchSampler(Sampler[list[int]]):
    """Batches of one rank from a dataset in its own order, split by the shares of the current plan.

    Args:
        num_samples: size of the dataset, at least one sample per rank.
        batch_size: samples per rank and step on average.
        shares: returns the weight of every rank; read at each ``iter``.
        rank: which rank's batches to draw.
        world_size: number of ranks.
        max_local: most samples of each rank, ``None`` for no limit.

    Raises:
        ValueError: if there are fewer samples than ranks.

    Example:
        >>> list(EvaluationBatchSampler(10, 4, lambda: (3, 1), rank=1, world_size=2))
        [[4], [9]]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        shares: Callable[[], Sequence[float]],
        rank: int,
        world_size: int,
        *,
        max_local: Sequence[int] | None = None,
    ) -> None:
        if num_samples < world_size:
            raise ValueError(
                f"{num_samples} samples cannot be shared by {world_size} ranks without repeating one. "
                "Evaluate on fewer ranks or set balance_evaluation=False."
            )
        self.num_samples, self.batch_size, self.rank, self.world_size = num_samples, batch_size, rank, world_size
        self.max_local = max_local
        self._shares = shares

    def __len__(self) -> int:
        full = min(self.batch_size * self.world_size, sum(self.max_local or [self.num_samples]))
        steps = -(-self.num_samples // full)
        return min(steps, self.num_samples // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        shares, steps = self._shares(), len(self)
        for step in range(steps):
            first, end = (self.num_samples * s // steps for s in (step, step + 1))
            sizes = proportional_sizes(end - first, shares, min_local=1, max_local=self.max_local)
            own = first + sum(sizes[: self.rank])
            yield list(range(own, own + sizes[self.rank]))
