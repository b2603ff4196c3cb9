"""Hold time models of workers with what is not certain of them, and the settings of their estimator."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "EstimatorSettings", "Times"]

Array = npt.NDArray[np.float64]

BLOCK = 8.0
"""Steps for which the walk of a speed is given."""


@dataclass(frozen=True)
class EstimatorSettings:
    """Settings of :class:`TimePosterior`; ``benchmarks/estimator.py`` sweeps each of them.

    Args:
        walks: ``omega``, standard deviation of the logarithm of a speed's walk over eight steps, ``> 0``, one per
            filter. Those above four times the least are filters of speeds that walk.
        rounds: ``rho``, standard deviation of what the steps of a round share, as a multiple of the scatter of single
            steps, ``>= 0``, one per filter. Where steps scatter, rounds do.
        prior: probability of each filter for a worker of which nothing is known; they are divided by their sum.
        prior_workers: workers that this probability counts for, beside those that are known, ``>= 0``.
        switch: probability that between two rounds another filter becomes the right one for a worker, 0 to 1.
        fixed_share: standard deviation of the share of fixed time of a worker that was seen at one size only, around 0.
        jump_probability: probability that a worker's speed jumps between two rounds, above 0 and below 1.
        jump: standard deviation of the logarithm of the speed in a jump, and of a worker nobody has seen, ``> 0``.
        reshape: standard deviation of each coefficient in a jump, as a share of the worker's time at that size.
        scatter: relative standard deviation of single steps that is assumed before any was measured.
        scatter_steps: steps that this assumption counts for, all workers together, ``> 0``.
        wide: share of a round's own scatter below which its variance is never taken to be, 0 to 1; a round in which
            something else ran scatters more than others, and counts less.
        odd: multiples of the scatter above the round's median beyond which a step is odd (a snapshot, another process):
            it counts no more than that, as long as no more than a tenth of a worker's steps are odd.
        scatter_memory: steps on which the scatter, and the share of odd steps, look back.
        own_scatter_steps: steps of its own from which on a worker's scatter counts more than that of all, ``> 0``.
        shape_walk: walk of each coefficient by itself, as a share of a speed's walk; the shape of a line hardly moves.
        gate: squared standard errors, ``> 0``, above which a jump is considered at all; about 2 where nothing moves.
        link_walk: standard deviation of the walk of what averaging takes between two rounds, as a share of it.
        link_rounds: standard deviation of one round of it, beside what the scatter of its steps says, as a share.
        link_scatter: relative scatter of single steps that is assumed where only a few show what the link takes.
        link_jump: standard errors beyond which what averaging takes is taken to have jumped.

    Example:
        >>> EstimatorSettings().fixed_share
        0.35
    """

    walks: tuple[float, ...] = (0.0005, 0.0005, 0.0005, 0.01, 0.03)
    rounds: tuple[float, ...] = (0.1, 0.5, 1.0, 0.1, 0.4)
    prior: tuple[float, ...] = (0.6, 0.12, 0.03, 0.15, 0.1)
    prior_workers: float = 8.0
    switch: float = 0.03
    fixed_share: float = 0.35
    jump_probability: float = 0.0005
    jump: float = 0.5
    reshape: float = 0.05
    scatter: float = 0.05
    scatter_steps: float = 1.0
    wide: float = 0.4
    odd: float = 4.0
    scatter_memory: float = 256.0
    own_scatter_steps: float = 8.0
    shape_walk: float = 0.1
    gate: float = 6.0
    link_walk: float = 0.01
    link_rounds: float = 0.02
    link_scatter: float = 0.1
    link_jump: float = 4.0


@dataclass(frozen=True)
class Times:
    """Time models of some workers with what is not certain of them.

    Args:
        mean: ``(q, s, k, m)`` of each worker, all ``>= 0``, shape ``(workers, 4)``.
        covariance: of these, shape ``(workers, 4, 4)``.
        scatter: relative standard deviation of single steps outside of and in backward, shape ``(workers, 2)``.
        walks: standard deviation of the logarithm of a speed's walk over eight steps, of each filter.
        probability: of each filter, mean of the workers.
        moving: by how much more likely it is that speeds walk than that they stand still, 0 to 1.

    Example:
        >>> one = Times(np.array([[1.0, 0.5, 2.0, 0.0]]), np.eye(4)[None], np.zeros((1, 2)), np.ones(1), np.ones(1))
        >>> seconds, errors = one.seconds(np.array([2.0]))
        >>> seconds.tolist(), errors.round(3).tolist()
        ([6.5], [3.162])
    """

    mean: Array
    covariance: Array
    scatter: Array
    walks: Array
    probability: Array
    moving: float = 0.0

    def parts(self, sizes: Array) -> tuple[Array, Array]:
        """``a`` and ``P`` of each worker at these sizes."""
        q, s, k, m = self.mean.T
        return q * sizes + s, k * sizes + m

    def seconds(self, sizes: Array, backward: float = 1.0, outside: float = 1.0) -> tuple[Array, Array]:
        """``outside a + backward P`` at these sizes and its standard error, both of shape ``(workers,)``.

        Args:
            sizes: samples of each worker.
            backward: how often the backward pass counts; a part of one where only its beginning does.
            outside: how often what is outside of it counts.
        """
        one = np.ones_like(sizes)
        row = np.stack([outside * sizes, outside * one, backward * sizes, backward * one], axis=1)
        variance = np.einsum("ni,nij,nj->n", row, self.covariance, row)
        return np.einsum("ni,ni->n", row, self.mean), np.sqrt(np.maximum(variance, 0.0))
