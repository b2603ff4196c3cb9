"""Gradient noise from the squared norms of one accumulation window, for micro-batches of any sizes.

A window has ``k`` micro-batches of ``n`` workers. The optimizer takes the gradient ``g = sum_it w_it g_it`` with the
mean gradient ``g_it`` of the ``b_it`` samples that worker ``i`` had in micro-batch ``t``. Three squared norms need no
copy of a gradient: that of a worker's share of ``g`` after its first micro-batch, that of its share at the end of the
window, and ``|g|^2``. With ``C_i = sum_t w_it`` and ``V_i = sum_t w_it^2 / b_it``, worker ``i``'s share divided by
``C_i`` counts as the mean gradient of ``n_i = C_i^2 / V_i`` samples; for equal micro-batches that is their number.

Shares of different workers are compared as in :mod:`lightning_hetero.core.noise.estimators` (``n - 1`` degrees of
freedom). A worker's first micro-batch and its whole window are two batches of which one contains the other, ``S_i =
(|first|^2 - |share|^2) / (1 / b_i1 - 1 / n_i)``. For Gaussian gradients its variance is ``2 tr(Sigma^2)`` over ``(1 /
b_i1 - 1 / n_i) / (1 / b_i1 + 1 / n_i + 2 / noise_scale)``, which takes the place of degrees of freedom. The two kinds
of estimates are uncorrelated where noise dominates, and are therefore weighted by their degrees of freedom.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.noise.estimators import METHODS, WeightRule, estimate_from_local_norms

__all__ = ["WindowEstimator", "window_estimator"]

Array = npt.NDArray[np.float64]

Coefficients = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Coefficients of a worker's first micro-batch, of its window and of ``|g|^2``, in ``S`` and in ``Q``."""


@checked_keywords
@dataclass(frozen=True, slots=True)
class WindowEstimator:
    """Coefficients of estimates that are linear in squared norms, worker by worker.

    ``(S, Q) = sum_i parts[i] @ (|first_i|^2, |local_i|^2, |g|^2)`` with ``E S = tr(Sigma)`` and ``E Q = |G|^2 +
    tr(Sigma) / samples``.

    Args:
        parts: for each worker, coefficients of ``S`` and of ``Q``.
        samples: number of samples that the whole window counts as.

    Example:
        >>> window_estimator(((4, 4),)) == WindowEstimator((((0.0, 4.0, -4.0), (0.0, 0.0, 0.5)),) * 2, 8.0)
        True
    """

    parts: tuple[Coefficients, ...]
    samples: float
    _whole: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        trace, signal = (sum(part[row][2] for part in self.parts) for row in (0, 1))
        object.__setattr__(self, "_whole", (trace, signal))

    def part(self, worker: int, *, divided: bool = False) -> Coefficients:
        """Return one worker's coefficients, for a worker that knows all of ``|g|^2``, or only its part if ``divided``.

        Example:
            >>> window_estimator(((4, 4),)).part(0, divided=True)
            ((0.0, 4.0, -8.0), (0.0, 0.0, 1.0))
        """
        trace, signal = self.parts[worker]
        if not divided:
            return trace, signal
        return (*trace[:2], self._whole[0]), (*signal[:2], self._whole[1])


@lru_cache(maxsize=256)
def window_estimator(
    sizes: tuple[tuple[int, ...], ...],
    *,
    divisor: float | None = None,
    summed: bool = False,
    method: str = "pooled",
    nested: bool = False,
    exact: bool = True,
    noise_scale: float = float("inf"),
    min_freedom: float = 0.5,
) -> WindowEstimator | None:
    """Make the estimator for the norms of a window; ``None`` if they cannot tell noise from signal.

    Args:
        sizes: samples of each worker in each micro-batch, shape ``(micro-batches, workers)``.
        divisor: divisor of the loss of each micro-batch; by default the number of micro-batches. A window that the end
            of an epoch cuts short has fewer micro-batches than its divisor.
        summed: whether losses are sums over samples rather than means.
        method: weights of the workers' estimates.
        nested: whether the norms of first micro-batches are available.
        exact: whether the all-reduce is exact; if it is compressed, ``|g|^2`` is not used.
        noise_scale: ``tr(Sigma) / |G|^2`` as far as it is known; a good guess reduces the variance.
        min_freedom: least share of its degrees of freedom that the comparison of workers must keep where micro-batches
            differ in size, 0 to 1.

    Example:
        >>> window_estimator(((4, 4),)).parts[0]  # S = 4 (|g_1|^2 + |g_2|^2 - 2 |g|^2), of local gradients 2 r_i g_i
        ((0.0, 4.0, -4.0), (0.0, 0.0, 0.5))
        >>> window_estimator(((4,),)) is None  # one batch of one worker
        True
        >>> window_estimator(((4,), (4,)), nested=True).parts  # S = 8 (|g_1|^2 - |g|^2)
        (((32.0, -8.0, 0.0), (0.0, 0.0, 1.0)),)
    """
    b = np.array(sizes, dtype=float)
    ranks = b.shape[1]
    shares = b / (ranks if summed else b.sum(axis=1, keepdims=True)) / (divisor or len(b))
    mean, variance = shares.sum(axis=0), np.divide(shares**2, b, out=np.zeros_like(b), where=b > 0).sum(axis=0)
    taken = mean > 0
    if not taken.any():
        return None
    own = np.divide(mean**2, variance, out=np.zeros(ranks), where=taken)
    total = float(mean.sum() ** 2 / variance.sum())
    unit = np.divide(1.0, ranks * mean, out=np.zeros(ranks), where=taken) ** 2  # |local_i|^2 to that of a mean gradient
    whole = 1.0 / mean.sum() ** 2
    if exact:
        out = _exact_parts(own, total, unit, whole, METHODS[method], min_freedom)
    else:
        out = _local_parts(own, total, unit)
    if exact and nested and len(b) > 1 and (method == "pooled" or ranks == 1):
        first_unit = np.divide(1.0, ranks * shares[0], out=np.zeros(ranks), where=shares[0] > 0) ** 2
        out = _with_first(out, b[0], own, unit, first_unit, 2.0 / max(noise_scale, 1e-30))
    if out is None:
        return None
    _, trace, signal = out
    if exact:
        signal[:, 2] += whole / ranks  # all workers know |g|^2
    return WindowEstimator(tuple((_row(s), _row(q)) for s, q in zip(trace, signal, strict=True)), total)


def _row(coefficients: Array) -> tuple[float, float, float]:
    first, local, whole = coefficients.tolist()
    return first, local, whole


Parts = tuple[float, Array, Array]
"""Degrees of freedom, and coefficients in ``S`` and in ``Q`` besides ``|g|^2``, each of shape ``(workers, 3)``."""


def _exact_parts(
    own: Array, total: float, unit: Array, whole: float, weights_of: WeightRule, min_freedom: float
) -> Parts | None:
    """Compare the shares of different workers; ``None`` for fewer than two, or if too little freedom is left."""
    taken = own > 0
    n, b = int(taken.sum()), own[taken]
    trace, signal = np.zeros((len(own), 3)), np.zeros((len(own), 3))
    if n < 2:
        return None
    w_signal, w_trace = weights_of(b)
    d = b * b.sum() / (b.sum() - b)
    kept = float((w_trace * d * (1 / b - 1 / total)).sum())  # 1 where all workers keep their share of the batch
    if kept < min_freedom:
        return None
    for out, weights in ((trace, w_trace), (signal, (w_trace - w_signal) / total)):
        out[taken, 1] = weights * d / kept * unit[taken]
        out[taken, 2] = -weights * d / kept * whole
    return n - 1.0, trace, signal


def _local_parts(own: Array, total: float, unit: Array) -> Parts | None:
    """Compare local norms of unequal batches; ``|g|^2`` of the exact sum would be ``|G|^2 + tr(Sigma) / B``."""
    taken = own > 0
    if len(set(own[taken].tolist())) < 2:
        return None
    trace, signal = np.zeros((len(own), 3)), np.zeros((len(own), 3))
    for i, row in zip(np.flatnonzero(taken), np.eye(int(taken.sum())), strict=True):
        estimate = estimate_from_local_norms(row, own[taken])
        trace[i, 1] = estimate.trace * unit[i]
        signal[i, 1] = (estimate.grad_sq_norm + estimate.trace / total) * unit[i]
    return 1.0, trace, signal


def _with_first(
    out: Parts | None, first: Array, own: Array, unit: Array, first_unit: Array, signal: float
) -> Parts | None:
    """Add the estimates from first micro-batches, each weighted by its degrees of freedom."""
    usable = (first > 0) & (own > first * (1 + 1e-9))
    freedom, trace, other = out or (0.0, np.zeros((len(own), 3)), np.zeros((len(own), 3)))
    if not usable.any():
        return out
    apart = 1 / first[usable] - 1 / own[usable]
    more = apart / (1 / first[usable] + 1 / own[usable] + signal)
    every = freedom + float(more.sum())
    trace = trace * (freedom / every)
    trace[usable, 0] = more / every / apart * first_unit[usable]
    trace[usable, 1] -= more / every / apart * unit[usable]
    return every, trace, other
