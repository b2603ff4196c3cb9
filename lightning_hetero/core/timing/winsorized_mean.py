"""Winsorized mean of a window of steps: the time that a worker takes for a step in the long run.

The mean is right, since the times of all steps add up to the time of a training. The median is wrong where steps vary
to one side only: under a CPU quota (containers, cgroups) a step either runs at full speed or waits for the next period,
and the median does not show how often it waits. But the longest tenth of a window counts only as much as the longest of
the rest: an event that happens once in a window (a snapshot, another process) is not the worker's pace.

Under a quota, even this mean is too short for a worker that waits for others in each step: its quota is renewed while
it waits, and it begins the next step at full speed. With more samples it would be limited to its quota
(:mod:`lightning_hetero.core.timing.cpu_quota`).
"""

import math

import numpy as np
import numpy.typing as npt

__all__ = ["WINSORIZED_SHARE", "num_winsorized", "winsorize_top", "winsorized_mean"]

Array = npt.NDArray[np.float64]

WINSORIZED_SHARE = 0.1
"""Share of the longest steps of a window whose excess does not count; at least one step, of three or more."""


def num_winsorized(steps: int) -> int:
    """Return the number of steps whose excess does not count: the longest tenth, at least one of three or more.

    Example:
        >>> num_winsorized(2), num_winsorized(3), num_winsorized(32)
        (0, 1, 4)
    """
    return math.ceil(WINSORIZED_SHARE * steps) if steps > 2 else 0


def winsorize_top(seconds: Array) -> Array:
    """Limit the longest tenth of a window to the longest of the rest.

    Args:
        seconds: of each step, shape ``(steps,)``, or ``(steps, workers)`` for each worker by itself.

    Example:
        >>> winsorize_top(np.array([1.0, 2.0, 3.0, 90.0])).tolist()
        [1.0, 2.0, 3.0, 3.0]
        >>> winsorize_top(np.array([[1.0, 5.0], [2.0, 1.0], [3.0, 1.0], [90.0, 1.0]])).tolist()
        [[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [3.0, 1.0]]
    """
    if len(seconds) == 0:
        return seconds
    most = np.sort(seconds, axis=0)[len(seconds) - 1 - num_winsorized(len(seconds))]
    return np.asarray(np.minimum(seconds, most, dtype=float))


def winsorized_mean(seconds: Array) -> float:
    """Return the mean of a window whose longest tenth is limited to the longest of the rest.

    Args:
        seconds: of each step, at least one.

    Example:
        >>> winsorized_mean(np.array([1.0, 2.0, 3.0, 90.0]))
        2.25
    """
    return float(winsorize_top(seconds).mean())
