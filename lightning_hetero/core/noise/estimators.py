"""Gradient noise scale from unequal batches (C sec. 4.4, C eq. 10-11; McCandlish et al., appendix A).

``noise_scale = tr(Sigma) / |G|^2`` with the covariance ``Sigma`` of single-sample gradients and the true gradient
``G``. For a batch of ``b`` samples ``E|g|^2 = |G|^2 + tr(Sigma) / b``, so norms at two batch sizes determine both. Here
these are the norms of the local gradients of ``n`` workers and of their weighted mean.

The local estimators of C eq. 10 are unbiased. The weights printed in Theorem 4.1 are not the best ones: its covariances
leave out the products ``g_i . g_j``. The minimum-variance weights need no matrix, ``w_i = (B - b_i) / ((n - 1) B)``,
and give the pooled variance of elementary statistics. The printed ones are kept as ``method="cannikin"`` for
comparison.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_choice, check_number

__all__ = [
    "METHODS",
    "NoiseScaleEstimate",
    "WeightRule",
    "estimate_from_local_norms",
    "estimate_from_two_sizes",
    "estimate_noise_scale",
    "local_estimates",
    "noise_scale_of",
]

Array = npt.NDArray[np.float64]


def noise_scale_of(trace: float, grad_sq_norm: float) -> float:
    """Return ``tr(Sigma) / |G|^2``; infinite with noise but no signal, NaN with neither or if one is unknown.

    Example:
        >>> noise_scale_of(4.0, 2.0), noise_scale_of(4.0, 0.0), noise_scale_of(0.0, 0.0)
        (2.0, inf, nan)
    """
    if grad_sq_norm > 0:
        return trace / grad_sq_norm
    return math.inf if trace > 0 and grad_sq_norm <= 0 else math.nan


@dataclass(frozen=True, slots=True)
class NoiseScaleEstimate:
    """Estimates from the gradients of one step; single steps are noisy and may even be negative.

    Args:
        grad_sq_norm: ``|G|^2``, squared norm of the true gradient.
        trace: ``tr(Sigma)``, summed variance of the gradient of one sample.
        biased: whether the gradients belong to different parameters (successive steps of a single worker).

    Example:
        >>> NoiseScaleEstimate(0.5, 100.0).noise_scale
        200.0
    """

    grad_sq_norm: float
    trace: float
    biased: bool = False

    @property
    def noise_scale(self) -> float:
        """``tr(Sigma) / |G|^2`` in samples; for ``|G|^2`` of 0 or below infinite if ``tr(Sigma) > 0``, else NaN."""
        return noise_scale_of(self.trace, self.grad_sq_norm)


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
    """Return each worker's unbiased estimates of ``|G|^2`` and ``tr(Sigma)`` (C eq. 10).

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
    """Return ``1^T A^-1 / (1^T A^-1 1)`` with the matrices as printed in Theorem 4.1 (C eq. 11)."""
    B, bi, bj = b.sum(), b[:, None], b[None, :]
    a_g = (B**2 - bi**2 - bj**2) / (B * (B - bi) * (B - bj))
    a_s = bi * bj * (B - bi - bj) / ((B - bi) * (B - bj))
    np.fill_diagonal(a_g, (B + 2 * b) / (B**2 - B * b))
    np.fill_diagonal(a_s, B * b / (B - b))
    solved = [np.linalg.lstsq(a, np.ones(len(b)), rcond=None)[0] for a in (a_g, a_s)]
    return solved[0] / solved[0].sum(), solved[1] / solved[1].sum()


WeightRule = Callable[[Array], tuple[Array, Array]]
"""Function from batch sizes to the weights of the workers' estimates of ``|G|^2`` and of ``tr(Sigma)``."""

METHODS: dict[str, WeightRule] = {"pooled": _pooled_weights, "cannikin": _cannikin_weights, "mean": _mean_weights}
"""Weights of the workers' estimates, by name."""


def estimate_noise_scale(
    local_sq_norms: Sequence[float] | Array,
    global_sq_norm: float,
    local_batch_sizes: Sequence[float] | Array,
    *,
    method: str = "pooled",
) -> NoiseScaleEstimate:
    """Estimate ``|G|^2`` and ``tr(Sigma)`` from one step of unequal workers (C sec. 4.4, corrected).

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
    """Estimate ``|G|^2`` and ``tr(Sigma)`` from gradients of two batch sizes (McCandlish et al., appendix A.1).

    With one worker and gradient accumulation, these are the first micro-batch and the whole window.

    Args:
        small_sq_norm: squared norm of the mean gradient of the smaller batch.
        small_batch: samples of the smaller batch.
        big_sq_norm: squared norm of the mean gradient of the bigger batch, which may contain the smaller one.
        big_batch: samples of the bigger batch, more than ``small_batch``.
        biased: whether to mark the result as biased.

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
    """Estimate ``|G|^2`` and ``tr(Sigma)`` from local norms of unequal batches, where the sum is compressed or stale.

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
