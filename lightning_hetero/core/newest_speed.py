"""Steps of a sync round since the newest change of a worker's speed.

A worker that became slower or faster within a round (another process, a stuck loader) has two speeds in its steps.
Their mean is neither, and what is learned from it fits no future step. The last steps tell what it takes now.
"""

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from lightning_hetero.core.observations import StepObservations

__all__ = ["MIN_STEPS", "since_change"]

Array = npt.NDArray[np.float64]

MIN_STEPS = 6
"""Steps in a row at one speed, and at the other."""
MIN_CHANGE = 0.2
"""Least difference of a step at the earlier speed, as a share of the shorter time."""
DEVIATIONS = 5.0
"""Least difference in robust standard deviations of single steps: steps at the two speeds do not overlap."""


def since_change(observations: StepObservations) -> StepObservations:
    """Return the newest steps, which all workers ran at the speed that they have now.

    The median of a worker's last :data:`MIN_STEPS` steps is its time now. Its speed changed at the end of the newest
    :data:`MIN_STEPS` steps in a row that were all far above this time, or all far below it. Single odd steps are no
    change. Steps under an earlier plan stay if nothing changed since.

    Args:
        observations: steps of a round.

    Example:
        >>> sizes, zeros = np.full((13, 2), 8.0), np.zeros((13, 2))
        >>> busy = np.array([[0.1, 0.5]] * 7 + [[0.1, 0.1]] * 6)
        >>> since_change(StepObservations(sizes, busy, *[zeros] * 5)).num_steps
        6
    """
    if observations.num_steps < 2 * MIN_STEPS:
        return observations
    own = observations.splits()[-1][1]
    begin = _newest_change(observations.compute[own])
    return observations if begin == 0 else observations.rows(slice(own.start + begin, None))


def _newest_change(compute: Array) -> int:
    """Return the first step since the newest change of any worker, 0 without one.

    Args:
        compute: seconds, shape ``(steps, workers)``.
    """
    if len(compute) < 2 * MIN_STEPS:
        return 0
    newest, older = compute[-MIN_STEPS:], compute[:-MIN_STEPS]
    now = np.median(newest, axis=0)
    least = DEVIATIONS * 1.4826 * np.median(np.abs(newest - now), axis=0)
    above = older > np.maximum(now * (1.0 + MIN_CHANGE), now + least)
    below = older < np.minimum(now / (1.0 + MIN_CHANGE), now - least)
    sides = np.concatenate([above, below], axis=1)
    rows = np.asarray(sliding_window_view(sides, MIN_STEPS, axis=0).all(axis=-1))
    ends = np.flatnonzero(rows.any(axis=1))
    return int(ends[-1]) + MIN_STEPS if len(ends) else 0
