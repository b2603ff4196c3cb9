"""What a worker takes for a step in the long run, from a window of single steps.

It is the mean, since the times of all steps add up to the time of a training. The median is something else where steps
scatter to one side: under a processor quota (containers, cgroups) a step runs at full speed or waits for the next
period, and its median says nothing of how often it waits. But the longest tenth of a window counts only as much as the
longest of the rest: what happens once in a window (a snapshot, another process) is not the worker's pace.

Nor is the pace under a quota what a worker shows that waits for others in each step: while it stands still its quota
comes back, and it begins the next step at full speed. Given more to do it would have to live on its share.
"""

import math

import numpy as np
import numpy.typing as npt

__all__ = ["capped", "pace", "rare_steps", "sustained"]

Array = npt.NDArray[np.float64]

PERIOD = 0.1
"""Seconds in which Linux hands out a processor quota."""
RARE = 0.1
"""Share of the steps of a window, its longest, whose excess does not count; one step at least, of three or more."""


def rare_steps(steps: int) -> int:
    """Steps of a window whose excess does not count: its longest tenth, one at least of three or more.

    Example:
        >>> rare_steps(2), rare_steps(3), rare_steps(32)
        (0, 1, 4)
    """
    return math.ceil(RARE * steps) if steps > 2 else 0


def capped(seconds: Array) -> Array:
    """A window of which the longest tenth counts only as much as the longest of the rest.

    Args:
        seconds: of each step, shape ``(steps,)``, or ``(steps, workers)`` for each worker by itself.

    Example:
        >>> capped(np.array([1.0, 2.0, 3.0, 90.0])).tolist()
        [1.0, 2.0, 3.0, 3.0]
        >>> capped(np.array([[1.0, 5.0], [2.0, 1.0], [3.0, 1.0], [90.0, 1.0]])).tolist()
        [[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [3.0, 1.0]]
    """
    if len(seconds) == 0:
        return seconds
    most = np.sort(seconds, axis=0)[len(seconds) - 1 - rare_steps(len(seconds))]
    return np.asarray(np.minimum(seconds, most, dtype=float))


def pace(seconds: Array) -> float:
    """Mean of a window, capped.

    Args:
        seconds: of each step, at least one.

    Example:
        >>> pace(np.array([1.0, 2.0, 3.0, 90.0]))
        2.25
    """
    return float(capped(seconds).mean())


def sustained(
    forward: Array, backward: Array, processor_forward: Array, processor_backward: Array, cores: float
) -> tuple[Array, Array]:
    """Times of the steps of a window as a processor quota allows them in the long run.

    ``cores`` seconds of processor time come with each second. Where the steps took about as long as what they used
    needs to come back, or less, the quota is what bounds the worker, and processor time, which does not scatter, takes
    the place of the observed times, scaled to what the window took or needs to come back, whichever is longer. Else the
    observed times stay, since something else bounds the worker.

    Args:
        forward: ``a`` of each step in seconds.
        backward: ``P`` of each step in seconds.
        processor_forward: seconds of processor time of each step outside of the backward pass.
        processor_backward: seconds of processor time of each step in the backward pass.
        cores: quota of the worker.

    Example:
        >>> used = np.array([0.01, 0.01]), np.array([0.02, 0.02])
        >>> [times.tolist() for times in sustained(np.array([0.01, 0.01]), np.array([0.02, 0.09]), *used, 0.25)]
        [[0.04, 0.04], [0.08, 0.08]]
        >>> [times.tolist() for times in sustained(np.array([0.1, 0.1]), np.array([0.2, 0.2]), *used, 0.25)]
        [[0.1, 0.1], [0.2, 0.2]]
    """
    used, took = float((processor_forward + processor_backward).sum()), float((forward + backward).sum())
    earned = used / cores
    if used == 0.0 or took > earned + min(PERIOD, 0.1 * earned):
        return forward, backward
    rate = max(took, earned) / used
    return processor_forward * rate, processor_backward * rate
