"""Step time without each single worker: what a worker brings, and whether one is better left out."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.finish_lines import FinishLines
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels
from lightning_hetero.simulate.planning.cluster import Cluster

__all__ = ["optimal_step_time", "step_time_without", "times_without_one"]

Array = npt.NDArray[np.float64]

EXACT = 100_000
"""Most kinds of workers times workers for which each is left out by an exact solution with whole sizes."""


def optimal_step_time(model: ClusterTimeModel, limits: npt.NDArray[np.int64], total: int) -> float:
    """Return the least step time of a total (OptPerf; C sec. 3.3), infinite if the total does not fit into memory.

    Args:
        model: time model of the workers.
        limits: most samples of each.
        total: samples of a step.
    """
    if limits.sum() < total or len(limits) > total:
        return np.inf
    step_time = solve_optperf(model, total, max_local=limits).step_time
    assert step_time is not None
    return step_time


def times_without_one(cluster: Cluster, total: int) -> tuple[float, Array]:
    """Return the least step time with all workers, and without each in turn, infinite where the others are too small.

    The link's times are those of one worker less. Equal workers are solved once. With very many kinds of workers, sizes
    are real numbers, with all workers as well.

    Args:
        cluster: the workers and their link.
        total: samples of a step.

    Returns:
        Seconds, and those of each worker.
    """
    count, limits, coefficients = len(cluster.workers), cluster.limits(total), cluster.coefficients
    if count == 1:
        return optimal_step_time(cluster.model(), limits, total), np.array([np.inf])
    kinds, first, which = np.unique(
        np.column_stack([coefficients, limits]), axis=0, return_index=True, return_inverse=True
    )
    if len(kinds) * count <= EXACT:
        time = optimal_step_time(cluster.model(), limits, total)
        found = np.array([step_time_without(cluster, i, total) for i in first])
    else:
        time = FinishLines.of(cluster.model(), np.ones(count), limits.astype(float)).solve(total)[0]
        lines = FinishLines.of(cluster.model(count - 1), np.ones(count), limits.astype(float))
        found = np.empty(len(kinds))
        for kind, without in _real(lines, first, total):
            found[kind] = without
    return time, np.asarray(found[which.ravel()])


def step_time_without(cluster: Cluster, i: int, total: int) -> float:
    """Return the least step time without one worker, in whole sizes.

    Args:
        cluster: the workers and their link.
        i: place of the worker.
        total: samples of a step.
    """
    model = cluster.model(len(cluster.workers) - 1)
    others = replace(model, nodes=NodeModels(np.delete(model.array, i, axis=0)))
    return optimal_step_time(others, np.delete(cluster.limits(total), i), total)


def _real(lines: FinishLines, first: npt.NDArray[np.intp], total: int) -> Iterator[tuple[int, float]]:
    """Yield the number of each kind and the time without one of it, with sizes as real numbers.

    The time rises with what the missing worker could have taken within it, so that each solution starts from the one
    before, in the order of that number. Newton steps on a concave function never overshoot.
    """
    time, _, _ = lines.solve(total)
    room, floors = lines.high.sum() - lines.high, lines.finish(lines.low)
    order = np.argsort(lines.capacity(time)[0][first], kind="stable")
    slowest = int(np.argmax(floors))
    second = float(np.delete(floors, slowest).max())
    for kind in order:
        i = int(first[kind])
        if room[i] < total:
            yield int(kind), np.inf
            continue
        start = second if i == slowest else float(floors[slowest])
        yield int(kind), _newton(lines, i, total, start if i == slowest else max(start, time))


def _newton(lines: FinishLines, i: int, total: int, time: float) -> float:
    for _ in range(200):
        sizes, slope = lines.capacity(time)
        gap = total - (sizes.sum() - sizes[i])
        if gap <= 1e-9 * total:
            break
        time += float(gap / (slope.sum() - slope[i]))
    return time
