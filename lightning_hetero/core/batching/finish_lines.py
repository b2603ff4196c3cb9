"""Finish time of each worker as two lines in its samples, and the samples that fit into a time (C eq. 5-6).

Each worker finishes at ``t_i(b) = max(alpha_1 b + beta_1, alpha_2 b + beta_2)``, increasing and convex. Within a time
``T`` it can take ``b_i(T) = min(hi_i, (T - beta_1) / alpha_1, (T - beta_2) / alpha_2)`` samples, increasing and
concave, and so is the sum over workers. The optimum is the ``T`` at which that sum equals the total. Newton steps find
it; on a concave function they never overshoot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.validation import check_int, check_sizes

__all__ = ["Bound", "FinishLines", "check_bounds"]

Array = npt.NDArray[np.float64]
Bound = int | Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class FinishLines:
    """The two lines of every worker's finish time and its bounds, as arrays of shape ``(workers,)``.

    Args:
        alpha_1: seconds per sample while computing is the worker's bottleneck.
        beta_1: fixed seconds in that case.
        alpha_2: seconds per sample while communication is the worker's bottleneck.
        beta_2: fixed seconds in that case.
        low: fewest samples.
        high: most samples.

    Example:
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.25, 0, 0, 0), NodeTimeModel(0.5, 0, 0, 0)))
        >>> lines = FinishLines.of(cluster, np.zeros(2), np.full(2, 9.0))
        >>> lines.finish(np.array([4.0, 4.0])).tolist(), lines.capacity(1.0)[0].tolist()
        ([1.0, 2.0], [4.0, 2.0])
    """

    alpha_1: Array
    beta_1: Array
    alpha_2: Array
    beta_2: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, cluster: ClusterTimeModel, low: Array, high: Array, multiple: int = 1) -> "FinishLines":
        """Return the lines of a cluster's workers, with these bounds, in units of ``multiple`` samples."""
        alpha_1, beta_1, alpha_2, beta_2 = cluster.coefficients()
        return cls(multiple * alpha_1, beta_1, multiple * alpha_2, beta_2, low, high)

    def finish(self, b: Array) -> Array:
        """Return the finish time of each worker for ``b`` samples, in seconds."""
        return np.maximum(self.alpha_1 * b + self.beta_1, self.alpha_2 * b + self.beta_2)

    def capacity(self, time: float) -> tuple[Array, Array]:
        """Return the samples that each worker can take within ``time``, and their slope in samples per second."""
        compute = (time - self.beta_1) / self.alpha_1
        communicate = (time - self.beta_2) / self.alpha_2
        bound = np.minimum(compute, communicate)
        slope = np.where(compute <= communicate, 1.0 / self.alpha_1, 1.0 / self.alpha_2)
        free = bound < self.high
        return np.where(free, bound, self.high), np.where(free, slope, 0.0)

    def part(self, keep: npt.NDArray[np.bool_]) -> "FinishLines":
        """Return the lines of some of the workers."""
        return FinishLines(*(getattr(self, field.name)[keep] for field in fields(self)))

    def solve(self, total: int) -> tuple[float, Array, bool]:
        """Return the least time, the sizes (real numbers), and whether a lower bound alone determines the time."""
        floor_time = time = float(self.finish(self.low).max())
        for _ in range(2 * len(self.low) + 2):
            sizes, slope = self.capacity(time)
            gap = total - sizes.sum()
            later = time + float(gap / slope.sum()) if gap > 1e-12 * total else time
            if later <= time:
                break
            time = later
        sizes = np.maximum(sizes, self.low)
        bounded = time == floor_time and sizes.sum() > total
        if bounded:
            sizes -= (sizes - self.low) * (sizes.sum() - total) / (sizes - self.low).sum()
        return time, sizes, bounded


def check_bounds(
    workers: int, total: int, min_local: Bound, max_local: Bound | None, multiple: int = 1
) -> tuple[Array, Array]:
    """Return the lower and upper bound of each worker, in units of ``multiple`` samples, if they allow the total.

    Args:
        workers: number of workers.
        total: samples to hand out.
        min_local: fewest samples of a worker, one number or one per worker, ``>= 0``.
        max_local: most samples of a worker, one number or one per worker; ``None`` for no limit.
        multiple: samples of a unit: lower bounds are rounded up to whole units, upper ones down.

    Raises:
        TypeError: if a bound is not an integer.
        ValueError: if the bounds cannot give the total; the message names them.

    Example:
        >>> [bound.tolist() for bound in check_bounds(2, 10, 1, [4, 100])]
        [[1.0, 1.0], [4.0, 10.0]]
        >>> [bound.tolist() for bound in check_bounds(2, 12, 1, [5, 100], multiple=2)]
        [[1.0, 1.0], [2.0, 6.0]]
    """
    check_int("multiple", multiple, minimum=1)

    def per_worker(name: str, bound: Bound) -> Array:
        if isinstance(bound, Sequence | np.ndarray):
            return np.array(check_sizes(name, bound, minimum=0, length=workers), dtype=float)
        return np.full(workers, float(check_int(name, bound, minimum=0)))

    low = multiple * np.ceil(per_worker("min_local", min_local) / multiple)
    high = np.full(workers, np.inf) if max_local is None else per_worker("max_local", max_local)
    high = multiple * np.floor(high / multiple)
    if np.any(low > high):
        i = int(np.argmax(low > high))
        raise ValueError(
            f"worker {i} has a lower bound of {int(low[i])} above its upper bound of {int(high[i])}. "
            "Lower min_local or raise max_local."
        )
    if low.sum() > total:
        raise ValueError(
            f"total_batch_size={total} cannot give each of {workers} workers its minimum (together {int(low.sum())}). "
            f"Raise the total to {int(low.sum())} or lower min_local."
        )
    if high.sum() < total:
        raise ValueError(
            f"total_batch_size={total} does not fit: the upper bounds {[int(h) for h in high[:16]]} sum to "
            f"{int(high.sum())}. Lower the total to {int(high.sum())}, raise max_local, or accumulate gradients."
        )
    if total % multiple:  # both of these are within the bounds, which are multiples
        raise ValueError(
            f"total_batch_size={total} cannot be split into multiples of {multiple}. Make it "
            f"{total - total % multiple} or {total + -total % multiple}."
        )
    return low / multiple, np.minimum(high, float(total)) / multiple
