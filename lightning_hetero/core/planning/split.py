"""The split of least step time, by curves of the workers' times that are interpolated between points."""

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.planning.worker_times import interpolated, stretches

Array = npt.NDArray[np.float64]
Curves = tuple[Array, Array]
"""Sizes and seconds, rising and not falling, of shape ``(points, several times the workers)``: a step may end with
computing or with the all-reduce, and the columns of the one come after those of the other."""


def finish_times(curves: Curves, sizes: Array) -> Array:
    """Return when each worker finishes a step with these sizes: the latest of its curves."""
    at, seconds = curves
    ends = interpolated(at, seconds, np.concatenate([sizes] * (at.shape[1] // len(sizes))))
    return np.asarray(ends.reshape(-1, len(sizes)).max(axis=0))


def most_samples(curves: Curves, time: float, workers: int) -> Array:
    """Return the samples that each worker finishes within some seconds, at least its fixed time."""
    at, seconds = curves
    (x, dx), (y, dy) = stretches(seconds, time, at, seconds)
    most = x + dx * np.where(dy > 1e-15, (time - y) / np.maximum(dy, 1e-15), 1e15)  # flat: any number
    return np.asarray(most.reshape(-1, workers).min(axis=0))


def solve(curves: Curves, low: Array, high: Array, total: int, unit: int = 1) -> npt.NDArray[np.int64]:
    """Solve for the whole sizes of least step time: no others with this sum finish earlier.

    The least time within which all workers together finish the total, each in whole units, is bracketed ever closer;
    those that finish last give back what is too much.

    Args:
        curves: a step ends with the latest of them.
        low: least size of each worker, a multiple of the unit.
        high: greatest size of each worker, a multiple of the unit; they allow the total.
        total: samples of a step, a multiple of the unit.
        unit: samples of which each size is a multiple.
    """

    def most(time: float) -> Array:
        whole = np.floor(most_samples(curves, time, len(low)) / unit * (1.0 + 1e-12) + 1e-9) * unit
        return np.asarray(np.clip(whole, low, high))

    # sizes that are everywhere as far between their bounds are enough together: no step need take longer
    share = (total - low.sum()) / max(float((high - low).sum()), 1.0)
    enough = np.ceil((low + share * (high - low)) / unit - 1e-9) * unit
    early, late = (float(finish_times(curves, sizes).max()) for sizes in (low, enough))
    least, sizes, halve = low, most(late), False
    while late > early * (1.0 + 1e-9) and sizes.sum() - total > unit:
        between = 0.5 if halve else (total - least.sum()) / (sizes.sum() - least.sum())
        time = early + (late - early) * min(max(between, 1e-3), 1.0 - 1e-3)
        found, halve = most(time), not halve
        if found.sum() < total:
            early, least = time, found
        else:
            late, sizes = time, found
    if sizes.sum() - total > len(sizes) * unit:  # a time in which sizes hardly matter: all give back their share
        room = sizes - least
        share = (sizes.sum() - total) / room.sum()
        sizes -= np.floor(room * share / unit) * unit
    while (over := int(sizes.sum() - total) // unit) > 0:
        last = np.argsort(-np.where(sizes > low, finish_times(curves, sizes), -1.0), kind="stable")
        last = last[: max(1, min(over, len(sizes) // 4))]
        sizes[last[sizes[last] > low[last]]] -= unit
    while sizes.sum() < total:
        sizes[np.argmin(np.where(sizes < high, finish_times(curves, sizes + unit), np.inf))] += unit
    return np.asarray(sizes, dtype=np.int64)
