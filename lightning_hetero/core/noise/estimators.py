"""Gradient noise scale from unequal batches (Cannikin, sec. 4.4, eq. 10-11; McCandlish et al., appendix A).

``noise_scale = tr(Sigma) / |G|^2`` with the covariance ``Sigma`` of single-sample gradients and the true gradient
``G``. For a batch of ``b`` samples ``E|g|^2 = |G|^2 + tr(Sigma) / b``, so norms of two batch sizes tell both; here
the local gradients of ``n`` workers and their weighted mean.

The local estimators of eq. 10 are unbiased. The weights printed in Theorem 4.1 are not the best ones: its covariances
leave out the products ``g_i . g_j``. The minimum-variance weights need no matrix, ``w_i = (B - b_i) / ((n - 1) B)``,
and give the pooled variance of elementary statistics. The printed ones are kept as ``method="cannikin"`` for
comparison.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_choice, check_number

__all__ = [
    "METHODS",
    "NoiseScaleEstimate",
    "RunningNoiseScale",
    "estimate_from_local_norms",
    "estimate_from_two_sizes",
    "estimate_noise_scale",
    "local_estimates",
]

Array = npt.NDArray[np.float64]

FEW_STEPS = 8.0
"""Steps with fewer of which nothing is said of how certain a running noise scale is."""


def _ratio(trace: float, grad_sq_norm: float) -> float:
    """``tr(Sigma) / |G|^2``; infinite if there is noise and no signal, NaN if neither was seen or one is unknown."""
    if grad_sq_norm > 0:
        return trace / grad_sq_norm
    return math.inf if trace > 0 and grad_sq_norm <= 0 else math.nan


@dataclass(frozen=True, slots=True)
class NoiseScaleEstimate:
    """Estimates from the gradients of one step; single steps are noisy and may even be negative.

    Args:
        grad_sq_norm: ``|G|^2``, squared norm of the true gradient.
        trace: ``tr(Sigma)``, summed variance of the gradient of one sample.
        biased: whether it rests on gradients at different parameters (a single worker's successive steps).

    Example:
        >>> NoiseScaleEstimate(0.5, 100.0).noise_scale
        200.0
    """

    grad_sq_norm: float
    trace: float
    biased: bool = False

    @property
    def noise_scale(self) -> float:
        """``tr(Sigma) / |G|^2`` in samples; infinite where only ``|G|^2`` is estimated at 0 or below, else NaN."""
        return _ratio(self.trace, self.grad_sq_norm)


def _checked(
    local_sq_norms: Sequence[float] | Array, local_batch_sizes: Sequence[float] | Array, least: int
) -> tuple[Array, Array]:
    norms, sizes = np.asarray(local_sq_norms, dtype=float), np.asarray(local_batch_sizes, dtype=float)
    if norms.ndim != 1 or norms.shape != sizes.shape:
        raise ValueError(
            f"give one squared norm and one batch size per worker; got shapes {norms.shape} and {sizes.shape}."
        )
    if np.any(sizes < 0) or not np.all(np.isfinite(sizes)):
        raise ValueError(f"local_batch_sizes={sizes.tolist()} must be finite and >= 0.")
    taken = sizes > 0
    if taken.sum() < least:
        raise ValueError(
            f"{int(taken.sum())} worker(s) with samples cannot tell noise from signal; at least {least} are needed. "
            "Use more workers, gradient accumulation (estimate_from_two_sizes), or successive steps."
        )
    return norms[taken], sizes[taken]


def local_estimates(
    local_sq_norms: Sequence[float] | Array, global_sq_norm: float, local_batch_sizes: Sequence[float] | Array
) -> tuple[Array, Array]:
    """Each worker's unbiased estimates of ``|G|^2`` and ``tr(Sigma)`` (Cannikin, eq. 10).

    ``G_i = (B |g|^2 - b_i |g_i|^2) / (B - b_i)``, ``S_i = b_i B / (B - b_i) (|g_i|^2 - |g|^2)``

    Args:
        local_sq_norms: ``|g_i|^2`` of each worker's mean gradient.
        global_sq_norm: ``|g|^2`` of the weighted mean ``g = sum_i (b_i / B) g_i``.
        local_batch_sizes: ``b_i``; workers with 0 samples are left out.

    Returns:
        ``(G_i, S_i)``, float64 arrays of the workers with samples.

    Raises:
        ValueError: if fewer than two workers have samples.

    Example:
        >>> G, S = local_estimates([2.0, 2.0], 1.5, [4, 4])
        >>> G.tolist(), S.tolist()
        ([1.0, 1.0], [4.0, 4.0])
    """
    norms, b = _checked(local_sq_norms, local_batch_sizes, 2)
    B = b.sum()
    return (B * global_sq_norm - b * norms) / (B - b), b * B / (B - b) * (norms - global_sq_norm)


def _pooled_weights(b: Array) -> tuple[Array, Array]:
    w = (b.sum() - b) / ((len(b) - 1) * b.sum())
    return w, w


def _mean_weights(b: Array) -> tuple[Array, Array]:
    w = np.full(len(b), 1.0 / len(b))
    return w, w


def _cannikin_weights(b: Array) -> tuple[Array, Array]:
    """``1^T A^-1 / (1^T A^-1 1)`` with the matrices as printed in Theorem 4.1 (eq. 11)."""
    B, bi, bj = b.sum(), b[:, None], b[None, :]
    a_g = (B**2 - bi**2 - bj**2) / (B * (B - bi) * (B - bj))
    a_s = bi * bj * (B - bi - bj) / ((B - bi) * (B - bj))
    np.fill_diagonal(a_g, (B + 2 * b) / (B**2 - B * b))
    np.fill_diagonal(a_s, B * b / (B - b))
    solved = [np.linalg.lstsq(a, np.ones(len(b)), rcond=None)[0] for a in (a_g, a_s)]
    return solved[0] / solved[0].sum(), solved[1] / solved[1].sum()


METHODS = {"pooled": _pooled_weights, "cannikin": _cannikin_weights, "mean": _mean_weights}


def estimate_noise_scale(
    local_sq_norms: Sequence[float] | Array,
    global_sq_norm: float,
    local_batch_sizes: Sequence[float] | Array,
    *,
    method: str = "pooled",
) -> NoiseScaleEstimate:
    """``|G|^2`` and ``tr(Sigma)`` from one step of unequal workers (Cannikin, sec. 4.4, corrected).

    ``"pooled"``: ``S = (sum_i b_i |g_i|^2 - B |g|^2) / (n - 1)``, ``|G|^2 = |g|^2 - S / B``: the unbiased combination
    of the local estimates with the least variance, ``Var(S) = 2 tr(Sigma^2) / (n - 1)`` for Gaussian gradients.

    Args:
        local_sq_norms: ``|g_i|^2`` of each worker's mean gradient; micro-batches of a window may count as workers.
        global_sq_norm: ``|g|^2`` of their mean weighted by samples.
        local_batch_sizes: ``b_i``; workers with 0 samples are left out.
        method: ``"pooled"``, ``"cannikin"`` (weights as printed in Theorem 4.1) or ``"mean"`` (equal weights).

    Returns:
        The estimate.

    Raises:
        ValueError: if the method is unknown, or fewer than two workers have samples.

    Example:
        >>> estimate = estimate_noise_scale([2.0, 2.0], 1.5, [4, 4])
        >>> estimate.grad_sq_norm, estimate.trace, estimate.noise_scale
        (1.0, 4.0, 4.0)
    """
    check_choice("method", method, tuple(METHODS))
    g, s = local_estimates(local_sq_norms, global_sq_norm, local_batch_sizes)
    sizes = np.asarray(local_batch_sizes, dtype=float)
    w_g, w_s = METHODS[method](sizes[sizes > 0])
    return NoiseScaleEstimate(float(w_g @ g), float(w_s @ s))


def estimate_from_two_sizes(
    small_sq_norm: float, small_batch: float, big_sq_norm: float, big_batch: float, *, biased: bool = False
) -> NoiseScaleEstimate:
    """``|G|^2`` and ``tr(Sigma)`` from gradients of two batch sizes (McCandlish et al., appendix A.1).

    For one worker with gradient accumulation: the first micro-batch and the whole window.

    Args:
        small_sq_norm: squared norm of the mean gradient of the smaller batch.
        small_batch: its samples.
        big_sq_norm: the same of the bigger batch, which may contain the smaller one.
        big_batch: its samples, more than ``small_batch``.
        biased: flag of the result.

    Raises:
        ValueError: if the bigger batch is not bigger.

    Example:
        >>> estimate_from_two_sizes(2.0, 4, 1.5, 8)
        NoiseScaleEstimate(grad_sq_norm=1.0, trace=4.0, biased=False)
    """
    check_number("small_batch", small_batch, low=0.0, include_low=False)
    if big_batch <= small_batch:
        raise ValueError(f"big_batch={big_batch} must have more samples than small_batch={small_batch}.")
    trace = (small_sq_norm - big_sq_norm) / (1.0 / small_batch - 1.0 / big_batch)
    return NoiseScaleEstimate(big_sq_norm - trace / big_batch, trace, biased)


def estimate_from_local_norms(
    local_sq_norms: Sequence[float] | Array, local_batch_sizes: Sequence[float] | Array
) -> NoiseScaleEstimate:
    """``|G|^2`` and ``tr(Sigma)`` from local norms of unequal batches alone, where the sum is compressed or delayed.

    Regression of ``|g_i|^2 = |G|^2 + tr(Sigma) / b_i`` over ``1 / b_i``, weighted by ``b_i^2`` (the variance of
    ``|g_i|^2`` falls with ``1 / b_i^2`` where noise dominates).

    Args:
        local_sq_norms: ``|g_i|^2``.
        local_batch_sizes: ``b_i``, of at least two different sizes.

    Raises:
        ValueError: if fewer than two workers have samples, or all sizes are equal.

    Example:
        >>> estimate = estimate_from_local_norms([3.0, 2.0], [2, 4])
        >>> round(estimate.grad_sq_norm, 6), round(estimate.trace, 6)
        (1.0, 4.0)
    """
    norms, b = _checked(local_sq_norms, local_batch_sizes, 2)
    if np.all(b == b[0]):
        raise ValueError(
            f"local norms of equal batches ({b[0]:g} samples) cannot tell noise from signal; vary the sizes."
        )
    x, w = 1.0 / b, b**2
    x_mean, y_mean = (w * x).sum() / w.sum(), (w * norms).sum() / w.sum()
    trace = float((w * (x - x_mean) * (norms - y_mean)).sum() / (w * (x - x_mean) ** 2).sum())
    return NoiseScaleEstimate(float(y_mean - trace * x_mean), trace)


@dataclass(frozen=True, slots=True)
class RunningNoiseScale:
    """Noise scale over many steps: ``tr(Sigma)`` and ``|g|^2`` are averaged apart, and only then put in relation.

    The averages fade with samples, not with steps: a sample's weight falls by ``1 / e`` after ``horizon`` further
    ones, so that the estimate looks back equally far whatever the batch size. Bias-corrected from the first step on.

    Args:
        horizon: samples after which the weight of an observation has fallen by ``1 / e``.
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
        """The estimate with one more step, or the mean of several; values that are not finite are left out and counted.

        Args:
            trace: ``S`` of the step.
            global_sq_norm: ``|g|^2`` of its global gradient.
            total_batch_size: ``B`` of the step, above 0.
            steps: steps that the values are means of.
            biased: whether it rests on successive steps.

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
        """The same estimate, with steps counted that were left out."""
        return replace(self, skipped=self.skipped + steps) if steps else self

    def merge(self, other: "RunningNoiseScale") -> "RunningNoiseScale":
        """Both estimates in one, each with its weight, e.g. of two parts of a run that were observed apart."""
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
        """``tr(Sigma) / |G|^2`` in samples; infinite where the signal is not seen yet, NaN before the first step."""
        return _ratio(self.trace, self.grad_sq_norm)

    @property
    def relative_error(self) -> float:
        """Standard error of :attr:`noise_scale` as a share of it; infinite where too little was seen to tell.

        By how single steps scatter: ``d ln phi = dS / S - (d|g|^2 - mean(1 / B) dS) / |G|^2``.

        Example:
            >>> running = RunningNoiseScale(horizon=1e6)
            >>> for trace in (3.0, 5.0) * 50:
            ...     running = running.update(trace=trace, global_sq_norm=1.5, total_batch_size=8)
            >>> round(running.relative_error, 4)  # a quarter of S, over ten, and as much again by way of |G|^2
            0.0375
        """
        w, signal = self.weight, self.grad_sq_norm
        count = w**2 / self.weight_squares if self.weight_squares else 0.0
        if count < FEW_STEPS or not signal > 0 or not self.trace > 0:
            return math.inf
        s, n, inverse = self.trace_sum / w, self.sq_norm_sum / w, self.inverse_sum / w
        by_s, by_n = 1.0 / s + inverse / signal, -1.0 / signal
        variance = by_s**2 * (self.trace_squares / w - s * s) + by_n**2 * (self.norm_squares / w - n * n)
        variance += 2.0 * by_s * by_n * (self.products / w - s * n)
        return math.sqrt(max(variance, 0.0) / count)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "RunningNoiseScale":
        """The estimate that :meth:`state_dict` described."""
        return cls(**state)
