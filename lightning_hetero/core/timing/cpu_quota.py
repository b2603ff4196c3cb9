"""Correct step times of a worker whose share of the CPU is limited by a quota."""

from lightning_hetero.core.timing.winsorized_mean import Array

__all__ = ["quota_limited_times"]


CFS_PERIOD = 0.1
"""Seconds after which Linux hands out a processor quota anew (``cpu.cfs_period_us``, by default)."""


def quota_limited_times(
    forward: Array, backward: Array, processor_forward: Array, processor_backward: Array, cores: float
) -> tuple[Array, Array]:
    """Return the times of a window's steps as a processor quota allows them in the long run.

    ``cores`` seconds of processor time come with each second. Where the steps took about as long as what they used
    needs to come back, or less, the quota is what bounds the worker, and processor time, which has no such noise, takes
    the place of the observed times, scaled to what the window took or needs to come back, whichever is longer. Else the
    observed times stay, since something else bounds the worker.

    Args:
        forward: ``a`` of each step in seconds.
        backward: ``P`` of each step in seconds.
        processor_forward: seconds of processor time of each step outside of the backward pass.
        processor_backward: seconds of processor time of each step in the backward pass.
        cores: quota of the worker.

    Example:
        >>> import numpy as np
        >>> used, seen = ([0.01, 0.01], [0.02, 0.02]), ([0.01, 0.01], [0.02, 0.09])
        >>> [times.tolist() for times in quota_limited_times(*map(np.array, (*seen, *used)), cores=0.25)]
        [[0.04, 0.04], [0.08, 0.08]]
        >>> slow = [0.1, 0.1], [0.2, 0.2]
        >>> [times.tolist() for times in quota_limited_times(*map(np.array, (*slow, *used)), cores=0.25)]
        [[0.1, 0.1], [0.2, 0.2]]
    """
    used, took = float((processor_forward + processor_backward).sum()), float((forward + backward).sum())
    earned = used / cores
    if used == 0.0 or took > earned + min(CFS_PERIOD, 0.1 * earned):
        return forward, backward
    rate = max(took, earned) / used
    return processor_forward * rate, processor_backward * rate
