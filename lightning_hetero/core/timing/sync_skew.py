"""Estimate what averaging takes each worker itself, apart from the link, by who came last in successive steps."""

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
    """Compare how long the last bucket's averaging takes after different workers came last, in seconds.

    A straggler often moves data slowly, too: then a step in which it comes last ends later after its arrival than a
    step that waits for a fast one. Compared are only steps that follow each other and waited for different workers, so
    that the link is the same for both: of steps further apart, a link that fluctuates would be taken for a worker. Nor
    is a step compared that took more than three times what others took that waited for the same worker, or all of them.

    Args:
        last: seconds of each step and worker for the last bucket, waiting included, shape ``(steps, workers)``.
        settings: of the estimator, those of the skew.

    Returns:
        Median difference and its variance for ``(i, j)``, ``i < j``, above 0 if worker ``i`` takes longer; of workers
        that took turns at being last three times at least.

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
    if finite.shape[1] > 1 and len(finite):  # else nobody came last: they all waited for the link
        calm &= np.partition(finite, 1, axis=1)[:, 1] - seconds >= settings.skew_waited * seconds
    for step, (i, j) in enumerate(zip(latest, latest[1:], strict=False)):
        before, after = seconds[step : step + 2]
        if i != j and calm[step : step + 2].all():
            pair, difference = (int(min(i, j)), int(max(i, j))), before - after
            found.setdefault(pair, []).append(float(difference if i < j else -difference))
    middle = {pair: round(float(np.median(seen)), 12) for pair, seen in found.items() if len(seen) >= 3}
    if not middle:
        return {}
    # noise of one difference, by mean deviations of normal values: within pairs, and where there are few of these of
    # all steps, which differ by workers as well
    apart = sum(float(np.abs(np.array(found[pair]) - value).sum()) for pair, value in middle.items())
    free = sum(len(found[pair]) - 1 for pair in middle)
    every = float(np.abs(np.diff(seconds[calm])).mean()) if calm.sum() > 1 else 0.0
    prior = settings.skew_prior_freedom
    variance = math.pi / 2 * ((apart / free) ** 2 * free + every**2 * prior) / (free + prior)
    doubled = 2.0  # of turns that follow each other, each step is in two differences
    return {pair: (value, doubled * math.pi / 2 * variance / len(found[pair])) for pair, value in middle.items()}


def per_worker_offsets(
    known: Mapping[int, tuple[float, float]],
    differences: Mapping[tuple[int, int], tuple[float, float]],
    scale: float,
    settings: EstimatorSettings = ESTIMATOR_DEFAULTS,
) -> dict[int, tuple[float, float]]:
    """Estimate each worker's own seconds of the last bucket's averaging, from differences of pairs.

    Normal values all of them: a worker that is new has none of its own, give or take ``scale``; one that is known may
    have changed by a little since, and what is known of it fades where nobody came last in turns.

    Args:
        known: seconds and their variance of workers seen before.
        differences: of pairs, as :func:`last_bucket_differences` gives them.
        scale: seconds that the link takes.
        settings: of the estimator, those of the skew.

    Returns:
        Seconds and their variance by worker; only differences of the seconds mean something.

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
    covariance = centre @ covariance @ centre  # what all have in common is the link's
    new = zip(workers, found.tolist(), np.diag(covariance).tolist(), strict=True)
    return {**known, **{worker: (seconds, variance) for worker, seconds, variance in new}}


def likely_offsets(
    known: Mapping[int, tuple[float, float]],
    workers: int,
    scale: float,
    settings: EstimatorSettings = ESTIMATOR_DEFAULTS,
) -> tuple[Array, Array]:
    """Return each worker's own seconds above the least of all, as far as it is likely to have any, and their variance.

    Jitter of the link alone makes some worker seem slow, and one of many very slow. So what was found of
    each counts by the probability that it is there at all: of a normal value as wide as the link's time, against none.

    Args:
        known: seconds and their variance by worker, of those that were seen to come last, about their mean.
        workers: number of all of them.
        scale: seconds that the link takes.
        settings: of the estimator, those of the skew.

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
