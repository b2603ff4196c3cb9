"""Time models of workers with their covariance, and the settings of their estimator."""

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_fields, check_number

__all__ = ["ESTIMATOR_DEFAULTS", "WALK_STEPS", "EstimatorSettings", "Times"]

Array = npt.NDArray[np.float64]

WALK_STEPS = 8.0
"""Number of steps to which the standard deviation of a speed's walk refers: the unit of ``walks``."""


@checked_keywords
@dataclass(frozen=True)
class EstimatorSettings:
    """Settings of the estimators of step times; ``benchmarks/estimator.py`` sweeps each of them.

    Settings without a prefix belong to :class:`~lightning_hetero.core.timing.filters.time_posterior.TimePosterior`,
    ``link_`` to :class:`~lightning_hetero.core.timing.link_times.LinkTimes`, ``skew_`` to
    :mod:`~lightning_hetero.core.timing.sync_skew`, and ``residual_`` to
    :class:`~lightning_hetero.core.timing.residual_time.Residual`. Those of the skew and the residual hardly affect the
    choice of a split: a worker's own part of the all-reduce is either far above its noise or negligible, and a residual
    common to all splits favors none. They determine how soon predictions follow a change, and their standard errors.

    Args:
        walks: ``omega``, standard deviation of the logarithm of a speed's walk over eight steps, ``> 0``, one per
            filter. Filters with more than four times the least one are those of speeds that walk.
        rounds: ``rho``, standard deviation of the noise common to all steps of a round, as a multiple of the noise of
            single steps, ``>= 0``, one per filter: where steps vary, rounds do, too.
        prior: probability of each filter for an unknown worker, normalized to the sum 1.
        prior_workers: number of workers as which this prior counts, beside the known workers, ``>= 0``.
        switch: probability that another filter becomes the right one for a worker between two rounds, 0 to 1.
        fixed_share: standard deviation, around 0, of the share of fixed time of a worker seen at one size only.
        jump_probability: probability that a worker's speed jumps between two rounds, above 0 and below 1.
        jump: standard deviation of the logarithm of the speed in a jump, and of a worker never seen, ``> 0``.
        reshape: standard deviation of each coefficient in a jump, as a share of the worker's time at that size.
        jitter: relative standard deviation of single steps that is assumed before any was measured.
        jitter_steps: number of steps, of all workers together, as which this assumption counts, ``> 0``.
        wide: least variance of a round as a share of its own noise, 0 to 1: a round disturbed by another process
            varies more than others, and counts less.
        odd: multiples of the noise above the round's median beyond which a step is odd (a snapshot, another process)
            and limited to that value, as long as at most a tenth of a worker's steps are odd.
        jitter_memory: steps over which the noise, and the share of odd steps, are averaged.
        own_jitter_steps: number of a worker's steps from which on its own noise outweighs that of all, ``> 0``.
        shape_walk: walk of each coefficient by itself, as a share of a speed's walk; the shape of a line hardly moves.
        gate: squared standard errors, ``> 0``, above which a jump is considered at all; about 2 where nothing moves.
        least_part: least share of a step for each of its two parts, ``> 0``, because of the covariance's precision.
        link_walk: standard deviation of the walk of the all-reduce time between two rounds, as a share of it.
        link_rounds: standard deviation of the all-reduce time of one round, beyond the noise of its steps, as a share.
        link_jitter: relative noise of single steps that is assumed where only a few steps show the link's time.
        link_jump: standard errors beyond which the all-reduce time counts as having jumped.
        link_few_steps: number of steps below which their own noise says little of the link, and no jump is accepted.
        link_bound_error: relative standard deviation of the all-reduce time while only an upper bound is known.
        link_same_end: greatest difference between the workers' ends of the all-reduce that counts as the same time, as
            a share of the all-reduce time.
        skew_walk: standard deviation by which a worker's own part of the all-reduce changes between two rounds, as a
            share of the link's time. Where workers take turns at being last, new differences outweigh it; where they do
            not, a part as long as the link's time is forgotten within tens of rounds.
        skew_waited: share by which every other worker's all-reduce has to be longer than the last worker's to count as
            waiting: above the resolution of clocks, and below any difference of workers that is worth a change.
        skew_prior_freedom: degrees of freedom as which the noise of all steps counts beside that within pairs: a prior
            for rounds with few pairs.
        skew_probability: prior probability that a worker has a part of its own, above 0 and below 1: most workers move
            data as fast as the others. Only its logarithm matters: at twice the value, a part that is less than a tenth
            smaller is judged equally likely.
        skew_stall: factor on the usual time of a step beyond which the link has stalled, ``>= 1``: together with the
            steps before and after, a stall makes two differences of one sign, which would decide a median of three.
        residual_prior: standard deviation of both parts of the residual before the first observation, as a share of the
            step, ``> 0``.
        residual_rounds: relative standard deviation of one round's measured time, beyond the noise of its steps.
        residual_walk: standard deviation of the walk of both parts between two rounds, as a share of the step.
        residual_shortfall: greatest share by which a measured time may fall short of the predicted one, 0 to 1; a
            shorter one is not a step, since the slowest worker alone takes longer.
        waiting_error: relative standard error of the excess of the slowest time in single steps over the slowest mean
            time, because the times are not exactly normal.

    Raises:
        TypeError: if a setting is not a number.
        ValueError: if a setting is out of its range, or there is not one of ``walks``, ``rounds`` and ``prior`` for
            each filter.

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
    jitter: float = 0.05
    jitter_steps: float = 1.0
    wide: float = 0.4
    odd: float = 4.0
    jitter_memory: float = 256.0
    own_jitter_steps: float = 8.0
    shape_walk: float = 0.1
    gate: float = 6.0
    least_part: float = 1e-4
    link_walk: float = 0.01
    link_rounds: float = 0.02
    link_jitter: float = 0.1
    link_jump: float = 4.0
    link_few_steps: int = 4
    link_bound_error: float = 0.5
    link_same_end: float = 0.05
    skew_walk: float = 0.05
    skew_waited: float = 0.02
    skew_prior_freedom: float = 4.0
    skew_probability: float = 0.02
    skew_stall: float = 3.0
    residual_prior: float = 0.03
    residual_rounds: float = 0.01
    residual_walk: float = 0.003
    residual_shortfall: float = 0.3
    waiting_error: float = 0.2

    def __post_init__(self) -> None:
        if not len(self.walks) == len(self.rounds) == len(self.prior) > 0:
            raise ValueError(
                f"walks={self.walks}, rounds={self.rounds} and prior={self.prior} of the estimator differ in length; "
                "give one value of each for every filter."
            )
        for name in ("walks", "rounds", "prior"):
            for value in getattr(self, name):
                check_number(f"EstimatorSettings.{name}", value, low=0.0, include_low=name != "walks")
        check_number("the sum of EstimatorSettings.prior", sum(self.prior), low=0.0, include_low=False)
        probabilities = ("jump_probability", "skew_probability")
        check_fields(self, probabilities, high=math.nextafter(1.0, 0.0), include_low=False)
        check_fields(self, ("switch", "wide", "residual_shortfall"), high=1.0)
        check_fields(self, ("skew_stall",), low=1.0)
        above = ("jump", "jitter_steps", "own_jitter_steps", "gate", "least_part", "residual_prior")
        check_fields(self, above, include_low=False)
        tuples_and_above = {"walks", "rounds", "prior", *above, *probabilities}
        check_fields(self, [field.name for field in fields(self) if field.name not in tuples_and_above])


ESTIMATOR_DEFAULTS = EstimatorSettings()


@dataclass(frozen=True)
class Times:
    """Time models of some workers, with their covariance.

    Args:
        mean: ``(q, s, k, m)`` of each worker, all ``>= 0``, shape ``(workers, 4)``.
        covariance: of these, shape ``(workers, 4, 4)``.
        jitter: relative standard deviation of single steps outside of and in backward, shape ``(workers, 2)``.
        walks: standard deviation of the logarithm of a speed's walk over eight steps, of each filter.
        probability: of each filter, mean of the workers.
        moving: probability that speeds walk minus the probability that they stand still, 0 to 1.

    Example:
        >>> one = Times(np.array([[1.0, 0.5, 2.0, 0.0]]), np.eye(4)[None], np.zeros((1, 2)), np.ones(1), np.ones(1))
        >>> seconds, errors = one.seconds(np.array([2.0]))
        >>> seconds.tolist(), errors.round(3).tolist()
        ([6.5], [3.162])
    """

    mean: Array
    covariance: Array
    jitter: Array
    walks: Array
    probability: Array
    moving: float = 0.0

    def parts(self, sizes: Array) -> tuple[Array, Array]:
        """Return ``a`` and ``P`` of each worker at these sizes."""
        q, s, k, m = self.mean.T
        return q * sizes + s, k * sizes + m

    def seconds(self, sizes: Array, backward: float = 1.0, outside: float = 1.0) -> tuple[Array, Array]:
        """Return ``outside a + backward P`` at these sizes and its standard error, both of shape ``(workers,)``.

        Args:
            sizes: samples of each worker.
            backward: factor on the backward pass; below 1 if only its beginning counts.
            outside: factor on the time outside of it.
        """
        one = np.ones_like(sizes)
        row = np.stack([outside * sizes, outside * one, backward * sizes, backward * one], axis=1)
        variance = np.einsum("ni,nij,nj->n", row, self.covariance, row)
        return np.einsum("ni,ni->n", row, self.mean), np.sqrt(np.maximum(variance, 0.0))

    def single_steps(self, sizes: Array) -> Array:
        """Return the relative standard deviation of ``a + P`` in single steps at these sizes, shape ``(workers,)``."""
        parts = np.stack(self.parts(sizes), axis=1)
        return np.asarray(np.hypot(*(parts * self.jitter).T) / parts.sum(axis=1))
