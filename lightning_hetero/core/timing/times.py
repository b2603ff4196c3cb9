"""Time models of workers with their covariance, and the settings of their estimator."""

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_fields, check_number

__all__ = ["ESTIMATOR_DEFAULTS", "WALK_STEPS", "EstimatorSettings", "Times"]

Array = npt.NDArray[np.float64]

WALK_STEPS = 8.0
"""Steps over which the standard deviation of a speed's walk is given: the unit of ``walks``."""


@dataclass(frozen=True)
class EstimatorSettings:
    """Settings of all that is learned of step times; ``benchmarks/estimator.py`` sweeps each of them.

    Those without a prefix are of :class:`~lightning_hetero.core.timing.filters.time_posterior.TimePosterior`;
    ``link_`` of
    :class:`~lightning_hetero.core.timing.link_times.LinkTimes`; ``skew_`` of
    :mod:`~lightning_hetero.core.timing.sync_skew`; ``residual_`` of
    :class:`~lightning_hetero.core.timing.residual_time.Residual`. The last two decide on no split: a worker's own part
    of averaging is many times its noise or hardly anything, and what all splits take longer by makes none the better
    one. They say how soon predictions follow, and how certain these are.

    Args:
        walks: ``omega``, standard deviation of the logarithm of a speed's walk over eight steps, ``> 0``, one per
            filter. Those above four times the least are filters of speeds that walk.
        rounds: ``rho``, standard deviation of what the steps of a round share, as a multiple of the noise of single
            steps, ``>= 0``, one per filter. Where steps vary, rounds do.
        prior: probability of each filter for a worker of which nothing is known; they are divided by their sum.
        prior_workers: workers that this probability counts for, beside those that are known, ``>= 0``.
        switch: probability that between two rounds another filter becomes the right one for a worker, 0 to 1.
        fixed_share: standard deviation of the share of fixed time of a worker that was seen at one size only, around 0.
        jump_probability: probability that a worker's speed jumps between two rounds, above 0 and below 1.
        jump: standard deviation of the logarithm of the speed in a jump, and of a worker nobody has seen, ``> 0``.
        reshape: standard deviation of each coefficient in a jump, as a share of the worker's time at that size.
        jitter: relative standard deviation of single steps that is assumed before any was measured.
        jitter_steps: steps that this assumption counts for, all workers together, ``> 0``.
        wide: share of a round's own noise below which its variance is never taken to be, 0 to 1; a round in which
            something else ran varies more than others, and counts less.
        odd: multiples of the noise above the round's median beyond which a step is odd (a snapshot, another process):
            it counts no more than that, as long as no more than a tenth of a worker's steps are odd.
        jitter_memory: steps over which the noise, and the share of odd steps, are averaged.
        own_jitter_steps: steps of its own from which on a worker's noise counts more than that of all, ``> 0``.
        shape_walk: walk of each coefficient by itself, as a share of a speed's walk; the shape of a line hardly moves.
        gate: squared standard errors, ``> 0``, above which a jump is considered at all; about 2 where nothing moves.
        least_part: share of a step that each of its two parts is taken to be at least, ``> 0``: a covariance has no
            more digits than that.
        link_walk: standard deviation of the walk of what averaging takes between two rounds, as a share of it.
        link_rounds: standard deviation of one round of it, beside what the noise of its steps says, as a share.
        link_jitter: relative noise of single steps that is assumed where only a few show what the link takes.
        link_jump: standard errors beyond which what averaging takes is taken to have jumped.
        link_few_steps: steps below which their own noise says little of the link, and no jump is believed.
        link_bound_error: relative standard deviation of what averaging takes while only a bound of it is known.
        link_same_end: share of the time of averaging by which workers may differ in when it ends, to be taken for one
            time.
        skew_walk: standard deviation by which a worker's own part of averaging changes between two rounds, as a share
            of what the link takes. Where workers take turns at being last, what they show outweighs it; where they do
            not, a part as long as the link's time is forgotten within tens of rounds.
        skew_waited: share of the last worker's averaging by which that of each other one has to be longer, so that
            this one waited: above what clocks resolve, and below any difference of workers that is worth a change.
        skew_prior_freedom: degrees of freedom for which the noise of all steps counts beside that within pairs, a
            prior for a round of few pairs.
        skew_probability: probability that a worker has a part of its own, before anything is seen, above 0 and below 1:
            most move data as fast as the others do. Its logarithm counts: with twice as much, a part is as likely that
            is less than a tenth smaller.
        skew_stall: factor on what a step usually takes beyond which it is the link that stalled, ``>= 1``: with the
            steps before and after, it makes two differences of one sign, which a median of three would believe.
        residual_prior: standard deviation of both parts of the residual before anything was seen, as a share of the
            step, ``> 0``.
        residual_rounds: relative standard deviation of one round of it, beside what the noise of its steps says.
        residual_walk: standard deviation of the walk of both parts between two rounds, as a share of the step.
        residual_shortfall: share of the predicted time by which a measured one may fall short of it, 0 to 1; what is
            shorter was no step, since the slowest worker alone takes longer.
        waiting_error: relative standard error of what the slowest worker of single steps takes longer than the slowest
            does on average: their times are no normal values.

    Raises:
        TypeError: if a setting is no number.
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
        moving: by how much more likely it is that speeds walk than that they stand still, 0 to 1.

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
            backward: how often the backward pass counts; a part of one where only its beginning does.
            outside: how often what is outside of it counts.
        """
        one = np.ones_like(sizes)
        row = np.stack([outside * sizes, outside * one, backward * sizes, backward * one], axis=1)
        variance = np.einsum("ni,nij,nj->n", row, self.covariance, row)
        return np.einsum("ni,ni->n", row, self.mean), np.sqrt(np.maximum(variance, 0.0))
