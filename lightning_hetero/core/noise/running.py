"""Running average of the gradient noise scale, which follows changes during training."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.noise.estimators import noise_scale_of
from lightning_hetero.core.validation import check_number

__all__ = ["RunningNoiseScale"]


@checked_keywords
@dataclass(frozen=True, slots=True)
class RunningNoiseScale:
    """Noise scale over many steps: ``tr(Sigma)`` and ``|g|^2`` are averaged separately, then divided.

    The averages fade with samples, not with steps: the weight of a sample falls to ``1 / e`` after ``horizon`` further
    ones, so the estimate looks back equally far at every batch size. Bias-corrected from the first step on.

    Args:
        horizon: samples after which the weight of an observation has fallen to ``1 / e``, above 0.
        trace_sum: weighted sum of ``S``.
        sq_norm_sum: weighted sum of ``|g|^2`` of the global gradient.
        inverse_sum: weighted sum of ``1 / B``.
        weight: sum of weights.
        samples: samples seen.
        skipped: steps left out because a norm was not finite.
        biased: whether a part rests on successive steps.
        trace_squares: weighted sum of ``S^2``.
        norm_squares: weighted sum of ``|g|^4``.
        products: weighted sum of ``S |g|^2``.
        weight_squares: sum of squared weights.

    Example:
        >>> running = RunningNoiseScale(horizon=1e6)
        >>> for _ in range(3):
        ...     running = running.update(trace=4.0, global_sq_norm=1.5, total_batch_size=8)
        >>> round(running.grad_sq_norm, 6), round(running.trace, 6), round(running.noise_scale, 6)
        (1.0, 4.0, 4.0)
    """

    min_steps_for_error: ClassVar[float] = 8.0
    """Number of steps below which :attr:`relative_error` is infinite, because the spread of few steps says little."""
    horizon: float = 50_000.0
    trace_sum: float = 0.0
    sq_norm_sum: float = 0.0
    inverse_sum: float = 0.0
    weight: float = 0.0
    samples: float = 0.0
    skipped: int = 0
    biased: bool = False
    trace_squares: float = 0.0
    norm_squares: float = 0.0
    products: float = 0.0
    weight_squares: float = 0.0

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
            ValueError: if the total is not above 0.
        """
        check_number("total_batch_size", total_batch_size, low=0.0, include_low=False)
        if not (math.isfinite(trace) and math.isfinite(global_sq_norm)):
            return self.left_out(math.ceil(steps))
        fade = math.exp(-steps * total_batch_size / self.horizon)
        share = 1.0 - fade
        return replace(
            self,
            trace_sum=fade * self.trace_sum + share * trace,
            sq_norm_sum=fade * self.sq_norm_sum + share * global_sq_norm,
            inverse_sum=fade * self.inverse_sum + share / total_batch_size,
            weight=fade * self.weight + share,
            samples=self.samples + steps * total_batch_size,
            biased=self.biased or biased,
            trace_squares=fade * self.trace_squares + share * trace**2,
            norm_squares=fade * self.norm_squares + share * global_sq_norm**2,
            products=fade * self.products + share * trace * global_sq_norm,
            weight_squares=fade**2 * self.weight_squares + share**2,
        )

    def left_out(self, steps: int) -> "RunningNoiseScale":
        """Count steps that were left out; the estimate stays."""
        return replace(self, skipped=self.skipped + steps) if steps else self

    def merge(self, other: "RunningNoiseScale") -> "RunningNoiseScale":
        """Merge two estimates by their weights, e.g. of two parts of a run that were observed separately."""
        return RunningNoiseScale(
            self.horizon,
            self.trace_sum + other.trace_sum,
            self.sq_norm_sum + other.sq_norm_sum,
            self.inverse_sum + other.inverse_sum,
            self.weight + other.weight,
            self.samples + other.samples,
            self.skipped + other.skipped,
            self.biased or other.biased,
            self.trace_squares + other.trace_squares,
            self.norm_squares + other.norm_squares,
            self.products + other.products,
            self.weight_squares + other.weight_squares,
        )

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
    def relative_error(self) -> float:
        """Standard error of :attr:`noise_scale` as a share of it; infinite where too few steps were seen.

        From the variance of single steps, with ``d ln phi = dS / S - (d|g|^2 - mean(1 / B) dS) / |G|^2``.

        Example:
            >>> running = RunningNoiseScale(horizon=1e6)
            >>> for trace in (3.0, 5.0) * 50:
            ...     running = running.update(trace=trace, global_sq_norm=1.5, total_batch_size=8)
            >>> round(running.relative_error, 4)  # a quarter of S, over ten, and as much again by way of |G|^2
            0.0375
        """
        w, signal = self.weight, self.grad_sq_norm
        count = w**2 / self.weight_squares if self.weight_squares else 0.0
        if count < self.min_steps_for_error or not signal > 0 or not self.trace > 0:
            return math.inf
        s, n, inverse = self.trace_sum / w, self.sq_norm_sum / w, self.inverse_sum / w
        by_s, by_n = 1.0 / s + inverse / signal, -1.0 / signal
        variance = by_s**2 * (self.trace_squares / w - s * s) + by_n**2 * (self.norm_squares / w - n * n)
        variance += 2.0 * by_s * by_n * (self.products / w - s * n)
        return math.sqrt(max(variance, 0.0) / count)

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "RunningNoiseScale":
        """Return the estimate that :meth:`state_dict` described."""
        return cls(**state)
