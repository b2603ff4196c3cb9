"""Correction of the step times of a worker under a CPU quota."""

from lightning_hetero.core.timing.winsorized_mean import Array

__all__ = ["quota_limited_times"]


CFS_PERIOD = 0.1
"""Seconds after which Linux renews a CPU quota (``cpu.cfs_period_us``, by default)."""


def quota_limited_times(
    forward: Array, backward: Array, processor_forward: Array, processor_backward: Array, cores: float
) -> tuple[Array, Array]:
    """Return the times of a window's steps that a CPU quota allows in the long run.

    The quota grants ``cores`` seconds of CPU time per second, so the CPU time that the window used takes ``used /
    cores`` seconds to be granted. If the steps took no longer than that, within a tolerance, the quota limits the
    worker. Then CPU time, which has no noise of throttling, replaces the observed times, scaled to the duration of the
    window or to ``used / cores``, whichever is longer. Otherwise something else limits the worker, and the observed
    times stay.

    Args:
        forward: ``a`` of each step in seconds.
        backward: ``P`` of each step in seconds.
        processor_forward: seconds of CPU time of each step outside of the backward pass.
        processor_backward: seconds of CPU time of each step in the backward pass.
        cores: quota of the worker, in cores.

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
