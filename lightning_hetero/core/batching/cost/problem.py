"""A global batch to be cut: costs of its samples in order, and what each worker can take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.cost.weights import CostWeights

__all__ = ["CutProblem"]


@dataclass(frozen=True, slots=True)
class CutProblem:
    """Samples in order of their cost, and the workers that take part.

    Args:
        positions: position of each sample in the global batch, the cheapest first.
        added: cost of each sample that adds up, ``a_s``.
        padding: cost for which it makes every sample of its share pay if it is the longest, ``m_s``; not decreasing.
        summed: sum of the first ``k`` of ``added``, for ``k`` from 0 to the number of samples.
        workers: ranks that take part.
        sizes: planned work of each.
        fixed: fixed work of each, ``h_i``.
        span: ``h_i + b_i``.
        low: fewest samples of each.
        high: most samples of each.

    Example:
        >>> problem = CutProblem.of([4.0, 1.0], [1, 1], CostWeights.of("padded_cost"), None, None)
        >>> problem.positions, problem.cost([0, 1])
        ([1, 0], 8.0)
    """

    positions: list[int]
    added: list[float]
    padding: list[float]
    summed: list[float]
    workers: list[int]
    sizes: list[int]
    fixed: list[float]
    span: list[float]
    low: list[int]
    high: list[int]

    @classmethod
    def of(
        cls,
        costs: Sequence[float] | npt.NDArray[np.float64],
        sizes: Sequence[int],
        weights: CostWeights,
        low: Sequence[int] | None,
        high: Sequence[int] | None,
    ) -> "CutProblem":
        """Sort the samples of a global batch; see :func:`~lightning_hetero.core.batching.cost.cut.cut`.

        Raises:
            ValueError: if the bounds do not allow the number of samples.
        """
        cost = np.asarray(costs, dtype=float)
        order = np.argsort(cost, kind="stable")
        length = cost[order]
        per_sample, per_cost, per_padded, per_square, per_padded_square = weights.theta
        added = per_sample + per_cost * length + per_square * length**2
        padding = per_padded * length + per_padded_square * length**2
        workers = [i for i, size in enumerate(sizes) if size > 0]
        fixed = [weights.fixed[i] if weights.fixed else 0.0 for i in workers]
        least = [1 if low is None else low[i] for i in workers]
        most = [len(cost) if high is None else min(high[i], len(cost)) for i in workers]
        if not sum(least) <= len(cost) <= sum(most):
            raise ValueError(
                f"{len(cost)} samples cannot be cut for workers that take {least} to {most} samples. Change the bounds."
            )
        return cls(
            order.tolist(),
            added.tolist(),
            padding.tolist(),
            np.concatenate([[0.0], np.cumsum(added)]).tolist(),
            workers,
            [int(sizes[i]) for i in workers],
            fixed,
            [f + sizes[i] for f, i in zip(fixed, workers, strict=True)],
            [int(number) for number in least],
            [int(number) for number in most],
        )

    @property
    def number(self) -> int:
        """Number of samples."""
        return len(self.positions)

    def cost(self, share: Sequence[int]) -> float:
        """Return the cost of a share: ``sum a_s + n max m_s``."""
        if not share:
            return 0.0
        return sum([self.added[i] for i in share]) + len(share) * self.padding[max(share)]

    def time(self, worker: int, share: Sequence[int]) -> float:
        """Return the time of a worker for a share, relative to that for its planned work."""
        return (self.fixed[worker] + self.cost(share)) / self.span[worker]

    def longest(self, shares: Sequence[Sequence[int]]) -> float:
        """Return the time of the worker that is done last."""
        return max([self.time(k, share) for k, share in enumerate(shares)])

    def least_time(self) -> float:
        """Return a time below which no cut is: without padding and borders, or for the longest sample alone.

        Example:
            >>> problem = CutProblem.of([1.0, 1.0, 4.0], [3, 3], CostWeights.of("cost"), None, None)
            >>> round(problem.least_time(), 3)
            1.333
        """
        alone = self.summed[-1] + sum(self.padding)
        last = self.added[-1] + self.padding[-1]
        largest = min((f + last) / s for f, s in zip(self.fixed, self.span, strict=True))
        return max((alone + sum(self.fixed)) / sum(self.span), largest, 1e-12)
