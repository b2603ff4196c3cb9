"""What a step takes by its split: the workers that train now, their all-reduce, and the split of least step time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.finish_lines import check_bounds
from lightning_hetero.core.planning.split import Curves, solve
from lightning_hetero.core.planning.worker_times import WorkerTimes, interpolated
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.timing.expected_maximum import expected_maximum
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels

Array = npt.NDArray[np.float64]
Split = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Forecast:
    """Step times of the workers that train now, by their split (C eq. 7).

    Args:
        workers: times of each.
        link: ``gamma``, ``t_o`` and ``t_u`` of their all-reduce.
        context: total, bounds, and micro-batches of a step.
    """

    workers: WorkerTimes
    link: tuple[float, float, float]
    context: PlanContext
    _expected: dict[bytes, float] = field(default_factory=dict, init=False)  # a decision asks for the same split again

    @cached_property
    def curves(self) -> Curves:
        """When each worker ends a step, by its size."""
        at, (a, p) = self.workers.curves
        return np.concatenate([at, at], axis=1), np.concatenate(
            step_ends(a, p, self.link, self.context.accumulation), axis=1
        )

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Least and greatest sizes, in whole multiples.

        Raises:
            ValueError: if they do not allow the total.
        """
        context, unit = self.context, self.context.multiple
        workers, total = len(context.identities), context.total_batch_size
        low, high = check_bounds(workers, total, context.min_local, context.max_local, unit)
        return low * unit, high * unit

    @cached_property
    def best(self) -> Split:
        """The split of least step time."""
        found = solve(self.curves, *self.bounds, self.context.total_batch_size, self.context.multiple)
        return tuple(found.tolist())

    def sizes(self, split: Sequence[int]) -> Array:
        """Return what each worker runs: at least its minimum, which counts with weight 0 if its size is 0."""
        return np.array(np.maximum(split, self.context.min_local), dtype=float)

    def finish(self, sizes: Array) -> Array:
        """Return the mean seconds after which each worker ends a step."""
        return np.asarray(self._ends(sizes).max(axis=0))

    def seconds(self, sizes: Array) -> float:
        """Return the expected seconds of a step, which waits for the slowest worker in it."""
        if (known := self._expected.get(key := sizes.tobytes())) is not None:
            return known
        ends = self._ends(sizes)
        single = (ends[0] - self.link[2]) * self.workers.jitter
        return self._expected.setdefault(key, expected_maximum(ends.max(axis=0), single)[0])

    def _ends(self, sizes: Array) -> Array:
        at, seconds = self.curves
        return interpolated(at, seconds, np.concatenate([sizes, sizes])).reshape(2, -1)

    def error(self, sizes: Array) -> float:
        """Return the standard error of the seconds, as a share."""
        return 1.25 * float(self.workers.errors(sizes).max())  # of several, the largest is a little more

    def lines(self, sizes: Array) -> ClusterTimeModel:
        """Return the time model of the workers as lines (C eq. 7) that meet the times at these sizes."""
        model = ClusterTimeModel(NodeModels(self.workers.lines(sizes)), *self.link)
        return model.accumulated(self.context.accumulation)


def step_ends(a: Array, p: Array, link: tuple[float, float, float], accumulation: int = 1) -> tuple[Array, Array]:
    """Return when steps end with computing and with the all-reduce as the bottleneck (C eq. 7), by ``a`` and ``P``.

    Of the micro-batches of a window the last is synchronized; the others count as time before it.
    """
    n, (gamma, t_o, t_u) = accumulation, link
    return n * (a + p) + t_u, n * a + (n - 1 + gamma) * p + t_o + t_u
