"""Prediction of the time of a step and its standard error, from the estimates of workers, link and residual.

The model of C eq. 7 takes the slowest of the workers' mean times. A step takes longer, because it waits for the worker
that is slowest in that very step. Here finish times are normally distributed; their deviation is the standard error of
a worker's mean time, or the jitter of its single steps. A step waits for the largest of them
(:mod:`lightning_hetero.core.timing.expected_maximum`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.expected_maximum import expected_maximum, larger_error
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels
from lightning_hetero.core.timing.times import ESTIMATOR_DEFAULTS, EstimatorSettings, Times

__all__ = ["StepPrediction"]

Array = npt.NDArray[np.float64]
Sizes = Sequence[int] | Array


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step times of some workers.

    Args:
        times: time models of the workers, each with its own part of the all-reduce time.
        link: times of the all-reduce, by the number of workers.
        residual: measured minus predicted step time.
        min_local: fewest samples that each worker runs; a worker with a smaller size runs them with weight 0.
        accumulation: micro-batches of a step, of which the last one is synchronized.
        settings: of the estimator; those of the residual and ``waiting_error`` are used.

    Example:
        >>> from lightning_hetero.core.timing.link_times import Level
        >>> mean, covariance = np.array([[0.001, 0.0, 0.002, 0.0]] * 2), np.zeros((2, 4, 4))
        >>> times = Times(mean, covariance, np.full((2, 2), 0.1), np.ones(1), np.ones(1))
        >>> link = LinkTimes(sync={2: (Level(0.0, 0.0), Level(0.01, 0.0))})
        >>> predicted = StepPrediction(times, link, Residual(), (1, 1))
        >>> round(predicted.bare.step_time([20, 20]), 3), round(predicted.model([20, 20]).step_time([20, 20]), 4)
        (0.07, 0.0725)
    """

    times: Times
    link: LinkTimes
    residual: Residual
    min_local: tuple[int, ...]
    accumulation: int = 1
    settings: EstimatorSettings = ESTIMATOR_DEFAULTS

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.times.mean)

    @property
    def gamma(self) -> float:
        """Share of the backward pass before the first bucket, limited to 0 to 1."""
        return min(max(self.link.gamma.value, 0.0), 1.0)

    @property
    def bare(self) -> ClusterTimeModel:
        """C eq. 7 alone, for a window of micro-batches."""
        link = self.link.at(self.workers)
        return ClusterTimeModel(NodeModels(self.times.mean), self.gamma, *link).accumulated(self.accumulation)

    def model(self, sizes: Sizes) -> ClusterTimeModel:
        """Return C eq. 7 plus the time by which steps with these sizes exceed it."""
        bare = self.bare
        more, less = max(self.residual.seconds, 0.0), min(self.residual.seconds, 0.0)
        factor = self.waiting_factor(sizes) * (1.0 + self.residual.share)
        factor += less / max(bare.step_time(sizes), 1e-12)  # as a share: no time may become negative
        return bare.slowed(max(factor, 0.5) - 1.0, more)

    def waiting_factor(self, sizes: Sizes) -> float:
        """Return the ratio of the expected maximum over workers in a single step to the maximum of their mean times."""
        seconds, _, jitter = self.finish(self._run(sizes))
        return expected_maximum(seconds, jitter)[0] / float(seconds.max())

    def error(self, sizes: Sizes) -> float:
        """Return the standard error in seconds of the step time predicted for these sizes."""
        seconds, errors, _ = self.finish(self._run(sizes))
        step, spread = expected_maximum(seconds, errors)
        scale, link = self.waiting_factor(sizes), self.link.error(self.workers)
        waits = self.settings.waiting_error * (scale - 1.0) * step
        residual = self.residual.error(scale * step, self.settings)
        parts = (scale * spread, residual, min(link, step), waits)
        return float(np.sqrt(sum(part**2 for part in parts)))

    def saving(self, model: ClusterTimeModel, sizes: Sizes, running: Array) -> tuple[float, float]:
        """Return the share of a step that other sizes are expected to save, and the share that errors may cost them.

        The second share is pessimistic: the expected maximum of the finish times plus one standard deviation. Both use
        the relative errors at the running sizes. Times at sizes never seen are less certain, but the first steps with
        them will measure them, so that uncertainty does not count against them.

        Args:
            model: time model of a step, such as :meth:`model`.
            sizes: sizes of another split.
            running: sizes of the running split, scaled to the same total.
        """
        seconds, errors, _ = self.finish(running)

        def expected(finish: Array) -> tuple[float, float]:
            return expected_maximum(finish, finish * errors / seconds)

        there = model.finish_times(sizes)
        now, (then, spread) = expected(model.finish_times(running))[0], expected(there)
        return 1.0 - then / now, 1.0 - float(there.max()) / (then + spread)

    def finish(self, sizes: Array) -> tuple[Array, Array, Array]:
        """Return each worker's finish time in seconds, its standard error, and the deviation of single steps."""
        n, gamma, times = self.accumulation, self.gamma, self.times
        t_o, t_u = self.link.at(self.workers)
        lines = []
        for share, after in ((1.0, t_u), (gamma, t_o + t_u)):
            seconds, errors = times.seconds(sizes, n - 1 + share, n)
            a, p = times.parts(sizes)
            single = n**0.5 * times.jitter  # of one micro-batch: the observed times are means over n of them
            jitter = np.hypot(a * single[:, 0] * n**0.5, p * single[:, 1] * (n - 1 + share**2) ** 0.5)
            lines.append((seconds + after, errors, jitter))
        (compute, compute_error, _), (send, send_error, _) = lines
        both = 0.5 * (times.seconds(sizes, 2 * (n - 1) + 1 + gamma, 2 * n)[1] ** 2 - compute_error**2 - send_error**2)
        errors = larger_error(compute, compute_error, send, send_error, both)
        seconds, _, jitter = (np.where(compute >= send, x, z) for x, z in zip(*lines, strict=True))
        return seconds, errors, jitter

    def _run(self, sizes: Sizes) -> Array:
        """Return the samples that each worker runs."""
        return np.maximum(sizes, self.min_local).astype(float)
