"""Division of each global batch by the cost of its samples."""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.cost.cut import cut
from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan
from lightning_hetero.core.timing.cost.features import FEATURES, share_features
from lightning_hetero.data.division import Parts

__all__ = ["CostDivision"]


class CostDivision:
    """Division of global batches such that all workers finish together, by the cost weights of the plan.

    Args:
        costs: cost of each sample of the dataset, above 0; only their ratios matter.
        first: weights until a plan has learned ones.
        min_local: fewest samples of a worker that gets any.
        max_local: most samples of each worker, ``None`` for no limit.

    Example:
        >>> division = CostDivision(np.array([5.0, 1.0, 1.0, 1.0, 2.0]), CostWeights.of("cost"))
        >>> division.divide([0, 1, 2, 3, 4], [2, 3], BatchPlan(5, (2, 3))).indices
        ([2, 3, 4], [0, 1])
    """

    def __init__(
        self,
        costs: npt.NDArray[np.float64],
        first: CostWeights,
        *,
        min_local: int = 1,
        max_local: Sequence[int] | None = None,
    ) -> None:
        self.costs = np.asarray(costs, dtype=np.float64) / np.mean(costs)
        self.first, self.min_local, self.max_local = first, min_local, max_local

    @property
    def features(self) -> int:
        """Number of features that describe a share."""
        return len(FEATURES)

    def weights(self, plan: BatchPlan) -> CostWeights:
        """Return the weights by which a plan divides."""
        return plan.cost or self.first

    def divide(self, samples: Sequence[int], sizes: Sequence[int], plan: BatchPlan) -> Parts:
        """Divide the samples of a global batch; see :class:`~lightning_hetero.data.division.Division`."""
        indices = np.asarray(samples, dtype=np.int64)
        costs = self.costs[indices]
        low = [min(self.min_local, size) for size in sizes]
        high = [max(bound, size) for bound, size in zip(self.max_local or [NO_LIMIT] * len(sizes), sizes, strict=True)]
        shares = cut(costs, sizes, self.weights(plan), low=low, high=high)
        return Parts(
            tuple(indices[share].tolist() for share in shares), tuple(share_features(costs[share]) for share in shares)
        )

    def fingerprint(self) -> int:
        """Return a checksum of the costs and of the limits."""
        limits = repr((self.first, self.min_local, self.max_local)).encode()
        return zlib.crc32(self.costs.tobytes(), zlib.crc32(limits))
