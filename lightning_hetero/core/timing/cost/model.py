"""Time of a step by the work of each worker's share: ``t_i = c_i + s_i (theta . f)``, with features chosen by fit.

All workers have the weights ``theta`` in common, since they run the same model; each has its own fixed time and speed.
The features are those with the lowest Bayesian information criterion, ``n log(RSS / n) + 2 k log n``. Its penalty is
twice the usual one, so a second feature is used only where it explains more than chance would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.cost.features import FEATURES

__all__ = ["CostFit", "fit_cost", "reduced_to_plan"]

Array = npt.NDArray[np.float64]

CANDIDATES: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (1, 3), (2, 4))
"""Sets of features to choose from, the simpler first."""
LEAST_STEPS = 8
ITERATIONS = 12
OUTLIER = 5.0
"""Residuals above so many robust standard deviations are left out: another process ran, or a page was swapped."""
LEAST_VARIATION = 0.005
"""Standard deviation of a worker's work, relative to its mean, below which nothing can be learned."""


@dataclass(frozen=True)
class CostFit:
    """Fit of the times of steps.

    Args:
        theta: weight of each feature; the work of an average sample is 1.
        fixed: ``c_i``, seconds of each worker whatever its share.
        slope: ``s_i``, seconds of each worker for the work of an average sample.
        criterion: Bayesian information criterion of the fit; lower is better.

    Example:
        >>> CostFit((0.0, 1.0, 0.0, 0.0, 0.0), fixed=(0.2,), slope=(0.1,), criterion=0.0).fixed_work
        (2.0,)
    """

    theta: tuple[float, ...]
    fixed: tuple[float, ...]
    slope: tuple[float, ...]
    criterion: float

    @property
    def fixed_work(self) -> tuple[float, ...]:
        """``h_i = c_i / s_i``, the fixed time of each worker in units of an average sample."""
        return tuple(c / max(s, 1e-12) for c, s in zip(self.fixed, self.slope, strict=True))


def fit_cost(work: Array, times: Array, sizes: Array) -> CostFit | None:
    """Fit the times of all workers by the features of their shares.

    Args:
        work: features of each share, shape ``(steps, workers, features)``.
        times: seconds of each worker, shape ``(steps, workers)``.
        sizes: planned work of each worker in average samples, shape ``(steps, workers)``.

    Returns:
        The fit with the lowest criterion, ``None`` if there are too few steps or the work does not vary.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> tokens = rng.uniform(0.5, 1.5, (20, 2)) * [3, 1]
        >>> work = np.stack([np.full((20, 2), 2.0), tokens, *[rng.uniform(1, 3, (20, 2))] * 3], axis=2)
        >>> fit = fit_cost(work, 0.1 + tokens * [0.1, 0.3], np.full((20, 2), 2.0))
        >>> [FEATURES[i] for i, weight in enumerate(fit.theta) if weight > 0]
        ['cost']
    """
    rows = np.flatnonzero(np.isfinite(times).all(axis=1) & np.isfinite(work).all(axis=(1, 2)))
    work, times, sizes = work[rows], times[rows], sizes[rows]
    busy = work[:, :, 0] > 0
    took_part: npt.NDArray[np.bool_] = np.asarray(2 * busy.sum(axis=0) > len(busy))
    rows = np.flatnonzero(busy[:, took_part].all(axis=1))  # the ragged last batch may have too few samples for all
    work, times, sizes = work[rows], times[rows], sizes[rows]
    if len(times) < LEAST_STEPS or not took_part.any() or np.any(times[:, took_part].mean(axis=0) <= 0):
        return None
    fits = [_fit_features(work[:, took_part], times[:, took_part], chosen) for chosen in CANDIDATES]
    known = [fit for fit in fits if fit is not None]
    if not known:
        return None
    best = min(known, key=lambda fit: fit.criterion)
    theta = np.array(best.theta)
    unit = float((work[:, took_part] @ theta).sum() / sizes[:, took_part].sum())
    fixed, slope = np.zeros(len(took_part)), np.ones(len(took_part))
    fixed[took_part], slope[took_part] = best.fixed, np.array(best.slope) * unit
    return CostFit(tuple((theta / unit).tolist()), tuple(fixed.tolist()), tuple(slope.tolist()), best.criterion)


def _fit_features(work: Array, times: Array, chosen: Sequence[int]) -> CostFit | None:
    """Fit the times by some of the features; ``None`` if one of them has no weight above 0."""
    features = work[:, :, list(chosen)]
    scale = features.mean(axis=(0, 1))
    if bool(np.any(scale <= 0)):
        return None
    features = features / scale
    relative = times / times.mean(axis=0)
    kept = _typical(relative / np.maximum(features.mean(axis=2), 1e-12))
    for _ in range(2):
        found = _alternate(features, relative, kept)
        if found is None:
            return None
        theta, fixed, slope = found
        residuals = relative - fixed - slope * (features @ theta)
        spread = 1.4826 * np.median(np.abs(residuals)) + 1e-9
        kept = np.abs(residuals) <= OUTLIER * spread
    clipped = np.minimum(np.abs(residuals), OUTLIER * spread)
    number = times.size
    criterion = number * np.log(float((clipped**2).mean()) + 1e-18) + 2.0 * len(chosen) * np.log(number)
    weights = np.zeros(len(FEATURES))
    weights[list(chosen)] = theta / scale
    mean = times.mean(axis=0)
    return CostFit(tuple(weights), tuple(fixed * mean), tuple(slope * mean), float(criterion))


def _typical(rates: Array) -> npt.NDArray[np.bool_]:
    """Return which times per work are near those of the same worker's other steps, so that a stall is not fitted."""
    logs = np.log(np.maximum(rates, 1e-12))
    away = np.abs(logs - np.median(logs, axis=0))
    return np.asarray(away <= OUTLIER * 1.4826 * np.median(away, axis=0) + 1e-9)


def _alternate(features: Array, times: Array, kept: npt.NDArray[np.bool_]) -> tuple[Array, Array, Array] | None:
    """Alternate between least squares for the speeds and for the weights; weights sum to 1."""
    count = features.shape[2]
    theta = np.full(count, 1.0 / count)
    for _ in range(ITERATIONS if count > 1 else 1):
        fixed, slope = _lines(features @ theta, times, kept)
        if not np.any(slope > 0):
            return None
        if count > 1:
            design = (features * slope[None, :, None])[kept]
            theta, *_ = np.linalg.lstsq(design, (times - fixed)[kept], rcond=None)
            if np.any(theta <= 0):
                return None
            theta = theta / theta.sum()
    fixed, slope = _lines(features @ theta, times, kept)
    return theta, fixed, slope


def _lines(work: Array, times: Array, kept: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return intercept and slope, both ``>= 0``, of each worker's times by its work."""
    weight = kept.astype(float)
    number = np.maximum(weight.sum(axis=0), 1.0)
    mean_work, mean_time = (work * weight).sum(axis=0) / number, (times * weight).sum(axis=0) / number
    variance = (weight * (work - mean_work) ** 2).sum(axis=0) / number
    covariance = (weight * (work - mean_work) * (times - mean_time)).sum(axis=0) / number
    proportional = mean_time / np.maximum(mean_work, 1e-12)
    varies = variance > (LEAST_VARIATION * mean_work) ** 2
    slope = np.where(varies, covariance / np.maximum(variance, 1e-24), proportional)
    slope = np.clip(slope, 0.0, proportional)
    return np.maximum(mean_time - slope * mean_work, 0.0), slope


def reduced_to_plan(observations: StepObservations, theta: Sequence[float]) -> StepObservations:
    """Return what would have been measured if each worker's work had been that of the plan: ``t + s (b - w)``.

    So a planner compares sizes, and the work that varies from step to step does not look like jitter. The slope ``s``
    of each part of a step is fitted to the observations themselves; the end of the synchronization moves with the
    worker that is done last.

    Args:
        observations: steps with features of their work.
        theta: weight of each feature.

    Example:
        >>> reduced_to_plan(StepObservations.empty(2), (0.0, 1.0, 0.0, 0.0, 0.0)).num_steps
        0
    """
    if observations.num_steps < 2 or observations.work.shape[2] != len(theta):
        return replace(observations, work=None)  # type: ignore[arg-type]
    work = observations.work @ np.asarray(theta, dtype=float)
    less = observations.local_batch_sizes - work
    moved: dict[str, Array] = {}
    for name in ("forward", "data_wait", "optimizer", "backward", "first_bucket"):
        values = getattr(observations, name)
        spread = np.abs(values - np.median(values, axis=0))
        kept = spread <= OUTLIER * 1.4826 * np.median(spread, axis=0) + 1e-9
        _, slope = _lines(work, values, kept | (spread == 0))
        moved[name] = np.maximum(slope * less, -0.9 * values)
    outside = moved["forward"] + moved["data_wait"] + moved["optimizer"]
    own = outside + moved["backward"]
    later = (observations.compute + own).max(axis=1) - observations.compute.max(axis=1)
    return replace(
        observations,
        **{name: getattr(observations, name) + change for name, change in moved.items()},
        last_sync=np.maximum(observations.last_sync + later[:, None] - own, 0.0),
        step_time=np.maximum(observations.step_time + later[:, None], 1e-9),
        bucket_ends=np.maximum(observations.bucket_ends + (later[:, None] - outside)[:, :, None], 0.0),
        work=None,  # type: ignore[arg-type]
    )
