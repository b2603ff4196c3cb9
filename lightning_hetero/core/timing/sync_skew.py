"""Per-worker share of the all-reduce time, from successive steps in which different workers came last."""

import math
import statistics
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.times import ESTIMATOR_DEFAULTS, EstimatorSettings

__all__ = ["last_bucket_differences", "likely_offsets", "per_worker_offsets"]

Array = npt.NDArray[np.float64]


def last_bucket_differences(
    last: Array, settings: EstimatorSettings = ESTIMATOR_DEFAULTS
) -> dict[tuple[int, int], tuple[float, float]]:
    """Compare the all-reduce times of the last bucket between steps in which different workers came last, in seconds.

    A straggler often moves data slowly, too. A step in which it comes last then takes longer after its arrival than a
    step that waits for a fast worker. Only successive steps that waited for different workers are compared, because the
    link is then the same for both: between distant steps, a fluctuation of the link would be mistaken for a worker. A
    step is skipped if it took more than three times the median of the steps that waited for the same worker, and more
    than three times the median of all.

    Args:
        last: seconds of each step and worker for the last bucket, waiting included, shape ``(steps, workers)``.
        settings: of the estimator; those of the skew are used.

    Returns:
        Median difference and its variance for each pair ``(i, j)``, ``i < j``, above 0 if worker ``i`` takes longer.
        Only pairs that took turns at being last at least three times.

    Example:
        >>> difference, variance = last_bucket_differences(np.array([[0.5, 0.3], [0.1, 0.2]] * 3))[0, 1]
        >>> difference, round(variance**0.5, 2)
        (-0.2, 0.14)
    """
    finite = last[np.isfinite(last).all(axis=1)]
    latest, seconds = finite.argmin(axis=1), finite.min(axis=1)
    found: dict[tuple[int, int], list[float]] = {}
    usual = [max(statistics.median_low(seconds[latest == i]), float(np.median(seconds))) for i in latest]
    calm = seconds <= settings.skew_stall * np.array(usual)
    if finite.shape[1] > 1 and len(finite):  # drop steps in which no worker came last: all waited for the link
        calm &= np.partition(finite, 1, axis=1)[:, 1] - seconds >= settings.skew_waited * seconds
    for step, (i, j) in enumerate(zip(latest, latest[1:], strict=False)):
        before, after = seconds[step : step + 2]
        if i != j and calm[step : step + 2].all():
            pair, difference = (int(min(i, j)), int(max(i, j))), before - after
            found.setdefault(pair, []).append(float(difference if i < j else -difference))
    middle = {pair: round(float(np.median(seen)), 12) for pair, seen in found.items() if len(seen) >= 3}
    if not middle:
        return {}
    # noise of one difference, from mean deviations of normal values: within pairs, with that of all steps as a prior,
    # which includes the differences between workers
    apart = sum(float(np.abs(np.array(found[pair]) - value).sum()) for pair, value in middle.items())
    free = sum(len(found[pair]) - 1 for pair in middle)
    every = float(np.abs(np.diff(seconds[calm])).mean()) if calm.sum() > 1 else 0.0
    prior = settings.skew_prior_freedom
    variance = math.pi / 2 * ((apart / free) ** 2 * free + every**2 * prior) / (free + prior)
    doubled = 2.0  # in consecutive turns, each step enters two differences
    return {pair: (value, doubled * math.pi / 2 * variance / len(found[pair])) for pair, value in middle.items()}


def per_worker_offsets(
    known: Mapping[int, tuple[float, float]],
    differences: Mapping[tuple[int, int], tuple[float, float]],
    scale: float,
    settings: EstimatorSettings = ESTIMATOR_DEFAULTS,
) -> dict[int, tuple[float, float]]:
    """Estimate each worker's own seconds of the last bucket's all-reduce, from differences of pairs.

    All values are modeled as normal. A new worker starts at 0 with standard deviation ``scale``. The variance of a
    known one grows by a small walk in every round; without new differences its estimate only becomes less certain.

    Args:
        known: seconds and their variance of workers seen before.
        differences: of pairs, as :func:`last_bucket_differences` gives them.
        scale: seconds that the link takes.
        settings: of the estimator; those of the skew are used.

    Returns:
        Seconds and their variance by worker; only differences between workers are meaningful.

    Example:
        >>> found = per_worker_offsets({}, {(0, 1): (-0.2, 0.0)}, 0.2)
        >>> round(found[1][0] - found[0][0], 3)
        0.2
    """
    walk = (settings.skew_walk * scale) ** 2
    known = {worker: (seconds, variance + walk) for worker, (seconds, variance) in known.items()}
    workers = sorted({worker for pair in differences for worker in pair})
    if not workers:
        return known
    place = {worker: row for row, worker in enumerate(workers)}
    before = np.array([known.get(worker, (0.0, scale**2)) for worker in workers])
    precision = np.diag(1.0 / (before[:, 1] + 1e-18))
    right = precision @ before[:, 0]
    for (i, j), (difference, variance) in differences.items():
        a, b, weight = place[i], place[j], 1.0 / (variance + 1e-4 * walk + 1e-18)
        precision[[a, b], [a, b]] += weight
        precision[[a, b], [b, a]] -= weight
        right[a] += weight * difference
        right[b] -= weight * difference
    covariance = np.linalg.inv(precision)
    found, centre = covariance @ right, np.eye(len(workers)) - 1.0 / len(workers)
    covariance = centre @ covariance @ centre  # the part common to all workers belongs to the link
    new = zip(workers, found.tolist(), np.diag(covariance).tolist(), strict=True)
    return {**known, **{worker: (seconds, variance) for worker, seconds, variance in new}}


def likely_offsets(
    known: Mapping[int, tuple[float, float]],
    workers: int,
    scale: float,
    settings: EstimatorSettings = ESTIMATOR_DEFAULTS,
) -> tuple[Array, Array]:
    """Return each worker's own seconds above the least of all, weighted by their probability, and their variance.

    Jitter of the link alone makes some worker seem slow, and one of many very slow. So each estimate is multiplied by
    the probability that the worker has a part of its own at all: a normal prior as wide as the link's time, against 0.

    Args:
        known: seconds, relative to their mean, and their variance, by worker; of workers that came last.
        workers: number of all workers.
        scale: seconds that the link takes.
        settings: of the estimator; those of the skew are used.

    Example:
        >>> likely_offsets({0: (0.2, 0.04**2), 1: (-0.02, 0.04**2)}, 2, 0.2)[0].round(3).tolist()
        [0.2, 0.0]
    """
    seconds, variance = np.zeros(workers), np.zeros(workers)
    rare = settings.skew_probability
    for worker, (own, spread) in known.items():
        spread = max(spread, 1e-18)
        log_odds = 0.5 * (own**2 / spread + math.log(spread / (scale**2 + spread))) + math.log(rare / (1.0 - rare))
        share = 1.0 / (1.0 + math.exp(-min(max(log_odds, -500.0), 500.0)))
        seconds[worker], variance[worker] = share * own, share**2 * spread
    return seconds - seconds.min(initial=0.0), variance
