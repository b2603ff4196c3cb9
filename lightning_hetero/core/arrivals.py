"""What averaging takes each worker itself, apart from the link: by who came last in steps that follow each other."""

import statistics
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["arrival_differences", "own_arrivals"]

Array = npt.NDArray[np.float64]

OWN_TRUST = 14 / 3
"""Weight of a known arrival against one pair: the difference of two then moves by 0.3 of what is new."""

STALL = 3.0
"""Factor on what a step usually takes beyond which it is the link that stalled: with the steps before and after it, it
makes two differences of one sign, which a median of three would believe."""


def arrival_differences(last: Array) -> dict[tuple[int, int], float]:
    """Seconds by which the last bucket's averaging takes longer when one worker came last than when another did.

    A slow worker often moves data slowly, too: then a step in which it comes last ends later after its arrival than a
    step that waits for a fast one. Compared are only steps that follow each other and waited for different workers, so
    that the link is the same for both: of steps further apart, a link that fluctuates would be taken for a worker. Nor
    is a step compared that took more than three times what others took that waited for the same worker, or all of them.

    Args:
        last: seconds of each step and worker for the last bucket, waiting included, shape ``(steps, workers)``.

    Returns:
        Median difference for ``(i, j)``, ``i < j``, above 0 if worker ``i`` takes longer; of workers that took turns at
        being last three times at least.

    Example:
        >>> arrival_differences(np.array([[0.5, 0.3], [0.1, 0.2]] * 3))
        {(0, 1): -0.2}
    """
    finite = last[np.isfinite(last).all(axis=1)]
    latest, seconds = finite.argmin(axis=1), finite.min(axis=1)
    found: dict[tuple[int, int], list[float]] = {}
    usual = [max(statistics.median_low(seconds[latest == i]), float(np.median(seconds))) for i in latest]
    calm = seconds <= STALL * np.array(usual)
    for step, (i, j) in enumerate(zip(latest, latest[1:], strict=False)):
        before, after = seconds[step : step + 2]
        if i != j and calm[step : step + 2].all():
            pair, difference = (int(min(i, j)), int(max(i, j))), before - after
            found.setdefault(pair, []).append(float(difference if i < j else -difference))
    return {pair: round(float(np.median(seen)), 12) for pair, seen in found.items() if len(seen) >= 3}


def own_arrivals(known: Mapping[int, float], differences: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Each worker's own seconds of the last bucket's averaging that agree best with differences between pairs.

    Least squares; what was known counts for 0.7 where one pair says something else, nothing at all where a worker is
    new. Workers that no pair names keep what they had.

    Args:
        known: seconds of workers seen before.
        differences: of pairs, as :func:`arrival_differences` gives them.

    Returns:
        Seconds by worker; only their differences mean something.

    Example:
        >>> found = own_arrivals({}, {(0, 1): -0.2})
        >>> round(found[1] - found[0], 6)
        0.2
    """
    workers = sorted({worker for pair in differences for worker in pair})
    place = {worker: row for row, worker in enumerate(workers)}
    trust = np.array([OWN_TRUST if worker in known else 1e-6 for worker in workers])
    matrix = np.diag(trust)
    right = trust * np.array([known.get(worker, 0.0) for worker in workers])
    for (i, j), difference in differences.items():
        a, b = place[i], place[j]
        matrix[[a, b], [a, b]] += 1.0
        matrix[[a, b], [b, a]] -= 1.0
        right[a] += difference
        right[b] -= difference
    found = np.linalg.solve(matrix, right) if workers else right
    return {**known, **{worker: float(seconds) for worker, seconds in zip(workers, found, strict=True)}}
