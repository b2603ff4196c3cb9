"""Running average of the gradient noise scale, which follows changes during training, and what it leaves open."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.noise.estimators import noise_scale_of
from lightning_hetero.core.validation import check_number

__all__ = ["RunningNoiseScale"]

Array = npt.NDArray[np.float64]

SCALES = np.geomspace(1e-2, 1e2, 33)
"""Noise scales that are thought possible, in totals, each as likely as the next before anything was seen."""
PRIOR_SPREADS, PRIOR_ROUNDS, MOST_ROUNDS = (0.5, 0.2), 3.0, 20.0
"""Standard deviations of ``S`` and of ``|g|^2`` of a single step as shares, and how many rounds of steps they count as;
those that were seen are averages of twenty rounds at most."""
ODD = 3.0
"""Standard deviations to which what is farther off is limited."""


@checked_keywords
@dataclass(frozen=True, slots=True)
class RunningNoiseScale:
    """Noise scale over many steps: ``tr(Sigma)`` and ``|g|^2`` are averaged separately, then divided.

    A step weighs as many samples as it has, and ``1 / e`` of that after ``horizon`` further steps. How sure the
    averages are follows from the spread of what was seen around what was expected.

    Args:
        horizon: steps after which the weight of an observation has fallen to ``1 / e``, above 0.
        trace_sum: weighted sum of ``S``.
        sq_norm_sum: weighted sum of ``|g|^2`` of the global gradient.
        inverse_sum: weighted sum of ``1 / B``.
        weight: sum of weights, in samples.
        samples: samples seen.
        skipped: steps left out because a norm was not finite.
        biased: whether a part rests on successive steps.
        trace_squares: sum of squares of ``S`` times its weight.
        norm_squares: sum of squares of ``|g|^2`` times its weight.
        trace_spread: variance of ``S`` of a single step, as a share of its square.
        norm_spread: variance of ``|g|^2`` of a single step, as a share of its square.
        rounds: updates that these variances are means of.

    Example:
        >>> running = RunningNoiseScale()
        >>> for _ in range(3):
        ...     running = running.update(trace=4.0, global_sq_norm=1.5, total_batch_size=8)
        >>> round(running.grad_sq_norm, 6), round(running.trace, 6), round(running.noise_scale, 6)
        (1.0, 4.0, 4.0)
    """

    horizon: float = 60.0
    trace_sum: float = 0.0
    sq_norm_sum: float = 0.0
    inverse_sum: float = 0.0
    weight: float = 0.0
    samples: float = 0.0
    skipped: int = 0
    biased: bool = False
    trace_squares: float = 0.0
    norm_squares: float = 0.0
    trace_spread: float = PRIOR_SPREADS[0] ** 2
    norm_spread: float = PRIOR_SPREADS[1] ** 2
    rounds: float = PRIOR_ROUNDS

    def __post_init__(self) -> None:
        check_number("horizon", self.horizon, low=0.0, include_low=False)

    def update(
        self,
        *,
        trace: float,
        global_sq_norm: float,
        total_batch_size: float,
        steps: float = 1,
        biased: bool = False,
    ) -> "RunningNoiseScale":
        """Add one more step, or the mean of several; values that are not finite are left out and counted.

        Args:
            trace: ``S`` of the step.
            global_sq_norm: ``|g|^2`` of its global gradient.
            total_batch_size: ``B`` of the step, above 0.
            steps: number of steps over which the values are means.
            biased: whether the values come from successive steps of a single worker.

        Raises:
            ValueError: if the total or the number of steps is not above 0.
        """
        check_number("total_batch_size", total_batch_size, low=0.0, include_low=False)
        check_number("steps", steps, low=0.0, include_low=False)
        if not (math.isfinite(trace) and math.isfinite(global_sq_norm)):
            return self.left_out(math.ceil(steps))
        seen = self
        if self.trace > 0:
            norm = self.grad_sq_norm + self.trace / total_batch_size
            seen = replace(
                self,
                trace_spread=self._spread(self.trace_spread, trace / self.trace, self.trace_squares, self.trace, steps),
                norm_spread=self._spread(self.norm_spread, global_sq_norm / norm, self.norm_squares, norm, steps),
                rounds=min(self.rounds + 1.0, MOST_ROUNDS),
            )
        fade, weight = math.exp(-steps / self.horizon), steps * total_batch_size
        return replace(
            seen,
            trace_sum=fade * self.trace_sum + weight * trace,
            sq_norm_sum=fade * self.sq_norm_sum + weight * global_sq_norm,
            inverse_sum=fade * self.inverse_sum + steps,
            weight=fade * self.weight + weight,
            samples=self.samples + weight,
            biased=self.biased or biased,
            trace_squares=fade**2 * self.trace_squares + (weight * trace) ** 2 / steps,
            norm_squares=fade**2 * self.norm_squares + (weight * global_sq_norm) ** 2 / steps,
        )

    def _spread(self, before: float, ratio: float, squares: float, expected: float, steps: float) -> float:
        """Return the variance of a single step, after a mean of some steps and its ratio to what was expected."""
        of_mean = 1.0 / steps + squares / (self.weight * expected) ** 2  # of the new mean, and of what was expected
        seen = min((ratio - 1.0) ** 2 / of_mean, ODD**2 * before)  # one odd step must not make all others worthless
        return before + (seen - before) / min(self.rounds + 1.0, MOST_ROUNDS)

    def left_out(self, steps: int) -> "RunningNoiseScale":
        """Count steps that were left out; the estimate stays."""
        return replace(self, skipped=self.skipped + steps) if steps else self

    @property
    def trace(self) -> float:
        """``tr(Sigma)``, at least 0; NaN before the first step."""
        return max(self.trace_sum / self.weight, 0.0) if self.weight else math.nan

    @property
    def grad_sq_norm(self) -> float:
        """``|G|^2 = mean |g|^2 - tr(Sigma) mean(1 / B)``, at least 0; NaN before the first step."""
        if not self.weight:
            return math.nan
        return max((self.sq_norm_sum - self.trace * self.inverse_sum) / self.weight, 0.0)

    @property
    def noise_scale(self) -> float:
        """``tr(Sigma) / |G|^2`` in samples; infinite while noise hides the signal, NaN before the first step."""
        return noise_scale_of(self.trace, self.grad_sq_norm)

    @property
    def posterior(self) -> tuple[Array, Array]:
        """Noise scales in samples, shape ``(scales,)``, and how likely each is by what was seen.

        For a noise scale ``phi``, ``|g|^2`` is ``S (1 / B + 1 / phi)`` on average. The means ``n`` of ``|g|^2`` and
        ``s`` of ``S`` are taken for normal, with the spreads of single steps. So ``phi`` is as likely as
        ``exp(-(n - c s)^2 / 2 v) / sqrt(v)`` with ``c`` the mean of ``1 / B + 1 / phi``, and ``v`` the variance of
        ``n - c s`` if that is the noise scale. The scales are multiples of the harmonic mean of the totals.

        Example:
            >>> running = RunningNoiseScale().update(trace=4.0, global_sq_norm=1.5, total_batch_size=8, steps=50)
            >>> scales, shares = running.posterior
            >>> round(float(shares @ scales), 1), round(float(shares[(scales > 2.0) & (scales < 8.0)].sum()), 1)
            (4.1, 1.0)
        """
        w, s = self.weight, self.trace
        inverse = self.inverse_sum / w
        if not s > 0:
            return SCALES[:1] / inverse, np.ones(1)
        expected = inverse * (1.0 + 1.0 / SCALES) * self.trace_sum
        norms = max(self.sq_norm_sum, 1e-9 * float(expected.min()))  # gradients may cancel each other exactly
        shares = self.norm_spread * self.norm_squares / norms**2
        shares += self.trace_spread * self.trace_squares / self.trace_sum**2
        log = -0.5 * (self.sq_norm_sum / expected - 1.0) ** 2 / shares - np.log(expected)
        likely = np.exp(log - log.max())
        return SCALES / inverse, likely / likely.sum()

    def efficiency(self, totals: Array, initial_total: float) -> Array:
        """Return the efficiency of a sample at totals, relative to one at ``B_0``; NaN while nothing is known.

        It is the geometric mean over the posterior, so that the best total does not depend on ``B_0``.

        Args:
            totals: ``B``, shape ``(totals,)``.
            initial_total: ``B_0``.

        Example:
            >>> running = RunningNoiseScale().update(trace=4.0, global_sq_norm=1.5, total_batch_size=8, steps=50)
            >>> running.efficiency(np.array([8.0, 16.0, 800.0]), 8.0).round(2).tolist()
            [1.0, 0.6, 0.02]
        """
        if math.isnan(self.noise_scale):
            return np.full(totals.shape, math.nan)
        scales, likely = self.posterior
        return np.asarray(np.exp(likely @ np.log((scales + initial_total)[:, None] / (scales[:, None] + totals))))

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "RunningNoiseScale":
        """Return the estimate that :meth:`state_dict` described."""
        return cls(**state)
