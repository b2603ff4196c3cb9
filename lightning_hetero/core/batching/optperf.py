"""The optimal split of a batch (OptPerf; C sec. 3.3, C Alg. 1), solved exactly.

The number of samples that all workers together can take within a time is a concave function of that time
(:mod:`lightning_hetero.core.batching.finish_lines`). The optimum is the time at which it equals the total. The paper's
search over overlap states can give negative sizes and wrong boundaries.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.finish_lines import Bound, FinishLines, check_bounds
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.validation import check_int

__all__ = ["solve_optperf", "solve_step_times", "static_sizes"]

Array = npt.NDArray[np.float64]


@checked_keywords
def solve_optperf(
    cluster: ClusterTimeModel,
    total_batch_size: int,
    *,
    min_local: Bound = 1,
    max_local: Bound | None = None,
    multiple: int = 1,
) -> BatchPlan:
    """Solve for the split of least step time (OptPerf; C sec. 3.3), exact with bounds and integers.

    Integer sizes are the floor of the real optimum; the remaining samples go, one by one, to the worker that then
    finishes earliest. Any integer split contains at least as many increments, so its largest finish time is no smaller.

    Args:
        cluster: time model of all workers.
        total_batch_size: ``B``, samples per step, ``>= 1``.
        min_local: fewest samples of a worker, one number or one per worker, ``>= 0``.
        max_local: most samples of a worker (memory), one number or one per worker; ``None`` for no limit.
        multiple: samples of which each size is a multiple, ``>= 1``; the optimum is exact in these units as well.

    Returns:
        A plan whose sizes sum to ``B`` exactly, with predicted step time and the bottleneck of each worker.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if the bounds cannot be met; the message names them.

    Example:
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> fast, slow = NodeTimeModel(0.001, 0.01, 0.002, 0.0), NodeTimeModel(0.003, 0.01, 0.006, 0.0)
        >>> plan = solve_optperf(ClusterTimeModel((fast, slow), gamma=0.3, t_o=0.02, t_u=0.005), 40)
        >>> plan.local_batch_sizes, round(plan.step_time, 3), plan.bottlenecks
        ((30, 10), 0.105, ('compute', 'compute'))
    """
    samples = check_int("total_batch_size", total_batch_size, minimum=1)
    low, high = check_bounds(len(cluster.nodes), samples, min_local, max_local, multiple)
    lines, total = FinishLines.of(cluster, low, high, multiple), samples // multiple
    _, sizes, bounded = lines.solve(total)
    whole = _round(lines, sizes, total)
    finish_compute = lines.alpha_1 * whole + lines.beta_1
    communicates = lines.alpha_2 * whole + lines.beta_2 > finish_compute
    step_time = float(lines.finish(whole).max())
    leave_out, without = _leave_out(lines, total, step_time) if bounded else ((), None)
    return BatchPlan(
        samples,
        tuple(int(b) * multiple for b in whole),
        step_time=step_time,
        bottlenecks=tuple("communication" if c else "compute" for c in communicates),
        leave_out=leave_out,
        step_time_without=without,
    )


def _round(lines: FinishLines, sizes: Array, total: int) -> Array:
    """Return integer sizes with the sum ``total`` and the least largest finish time."""
    whole = np.floor(sizes + 1e-9)
    while whole.sum() > total:  # rounding of the time may give a worker with tiny time per sample one sample too many
        whole = np.maximum(whole - 1.0, lines.low)
    rest = int(total - whole.sum())
    if rest == 0:
        return whole
    room = np.minimum(lines.high - whole, rest)
    if rest > (room > 0).sum():  # rounding leaves less than a sample each: here one is below the last digit of the time
        return np.asarray(whole + _evenly(room, rest))

    def more(time: float) -> Array:
        """Return the samples that each worker can take beyond ``whole`` within a time."""
        return np.asarray(np.clip(np.floor(lines.capacity(time)[0] + 1e-9) - whole, 0.0, room))

    first = np.where(room > 0, lines.finish(whole + 1), np.inf)
    # the ``rest`` earliest increments all end by ``late``: list every increment up to there, second ones included
    late, early = float(np.partition(first, rest - 1)[rest - 1]), float(lines.finish(whole).min())
    count = np.maximum(more(late), room > 0)
    while count.sum() > rest + len(whole):
        middle = 0.5 * (early + late)
        if not early < middle < late:  # what is left ends in the same moment, as far as the digits go
            certain = np.where(more(early).sum() <= rest, more(early), 0.0)
            return np.asarray(whole + certain + _evenly(count - certain, int(rest - certain.sum())))
        fewer = more(middle)
        if fewer.sum() < rest:
            early = middle
        else:
            late, count = middle, fewer
    owner = np.repeat(np.arange(len(whole)), count.astype(int))
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count.astype(int)) + 1
    b = whole[owner] + nth
    when = np.maximum(lines.alpha_1[owner] * b + lines.beta_1[owner], lines.alpha_2[owner] * b + lines.beta_2[owner])
    chosen = np.argsort(when, kind="stable")[:rest]
    return np.asarray(whole + np.bincount(owner[chosen], minlength=len(whole)))


def _evenly(room: Array, number: int) -> Array:
    """Return shares of a number that differ by one at most, except where there is less room.

    Example:
        >>> _evenly(np.array([1.0, 9.0, 9.0]), 8).tolist()
        [1.0, 4.0, 3.0]
    """
    given, open_ = np.zeros_like(room), np.flatnonzero(room > 0)
    while number > 0 and len(open_):
        each = max(number // len(open_), 1)
        part = np.minimum(room[open_] - given[open_], each)[:number]
        given[open_[: len(part)]] += part
        number -= int(part.sum())
        open_ = open_[given[open_] < room[open_]]
    return given


def _leave_out(lines: FinishLines, total: int, step_time: float) -> tuple[tuple[int, ...], float | None]:
    """Return the workers whose minimum alone takes longer than the others need for the total, and the time without.

    With the ``k`` workers of the slowest minimum left out, the longest minimum of the rest falls with ``k``, and the
    time that the rest needs for the total rises, both in whole samples. The best ``k`` is where the two cross, or one
    before; workers with the same minimum are left out together.
    """
    slowest_first = np.argsort(-lines.finish(lines.low), kind="stable")

    def rest(k: int) -> FinishLines:
        return lines.part(np.isin(np.arange(len(slowest_first)), slowest_first[:k], invert=True))

    def time(k: int) -> float:
        part = rest(k)
        if not len(part.low) or part.high.sum() < total:
            return np.inf
        return float(part.finish(_round(part, part.solve(total)[1], total)).max())

    few, many = 0, len(slowest_first)  # without ``few`` workers a minimum determines the time, without ``many`` none
    while many - few > 1:
        k = (few + many) // 2
        part = rest(k)
        few, many = (k, many) if time(k) <= part.finish(part.low).max() else (few, k)
    best: tuple[int, float] = (0, step_time)
    for k in (few, many):
        shorter = time(k) if k > 0 else np.inf
        best = (k, shorter) if shorter < best[1] else best
    longer = lines.finish(lines.low) > best[1] * (1.0 + 1e-12)  # one that is as fast as the rest does no harm
    left_out = tuple(sorted(int(i) for i in slowest_first[: best[0]] if longer[i]))
    return left_out, (best[1] if left_out else None)


def solve_step_times(
    cluster: ClusterTimeModel,
    total_batch_sizes: Sequence[int] | npt.NDArray[np.int64],
    *,
    min_local: Bound = 1,
    max_local: Bound | None = None,
    multiple: int = 1,
) -> Array:
    """Solve for the least step time of many totals at once, with sizes as real numbers (C sec. 4.5).

    The capacity of the cluster is a concave, piecewise linear function of the time with at most two breaks per
    worker; it is tabulated once and inverted for every total. Real numbers say too little of sizes that are multiples
    of many samples, so with ``multiple > 1`` each total is solved by :func:`solve_optperf`.

    Args:
        cluster: time model of all workers.
        total_batch_sizes: candidates for ``B``.
        min_local: as in :func:`solve_optperf`.
        max_local: as in :func:`solve_optperf`.
        multiple: as in :func:`solve_optperf`.

    Returns:
        Seconds, float64 of the shape of ``total_batch_sizes``.

    Raises:
        ValueError: if a total is outside what the bounds allow.

    Example:
        >>> from lightning_hetero.core.timing.step_time import NodeTimeModel
        >>> cluster = ClusterTimeModel((NodeTimeModel(0.001, 0, 0, 0), NodeTimeModel(0.003, 0, 0, 0)))
        >>> solve_step_times(cluster, [40, 80]).round(6).tolist()
        [0.03, 0.06]
    """
    totals = np.asarray(total_batch_sizes, dtype=float)
    if totals.size == 0:
        return totals
    if multiple > 1:
        bounds: dict[str, Any] = {"min_local": min_local, "max_local": max_local, "multiple": multiple}
        return np.array([solve_optperf(cluster, int(total), **bounds).step_time for total in totals])
    workers = len(cluster.nodes)
    low, _ = check_bounds(workers, int(totals.min()), min_local, None)
    _, high = check_bounds(workers, int(totals.max()), min_local, max_local)
    lines = FinishLines.of(cluster, low, high)
    start = float(lines.finish(low).max())
    gap = lines.alpha_1 - lines.alpha_2
    crossing = np.where(gap > 0, (lines.beta_2 - lines.beta_1) / np.where(gap > 0, gap, 1.0), -np.inf)
    crossing_time = np.maximum(np.where(crossing > 0, lines.alpha_1 * crossing + lines.beta_1, start), start)
    full_time = np.maximum(lines.finish(high), start)
    times = np.unique(np.concatenate([[start], crossing_time[crossing < high], full_time]))
    capacity = _capacity_table(lines, times, crossing_time, full_time, start)
    return np.asarray(np.interp(totals, capacity, times))


def _capacity_table(lines: FinishLines, times: Array, crossing_time: Array, full_time: Array, start: float) -> Array:
    """Sum of capacities at each of the sorted ``times``, by accumulating slopes between the breaks.

    Workers with tiny time per sample are full right after ``start``; in floating point, their huge slopes would swallow
    all others. So slopes are summed from the end, and the sizes are anchored at the first break that is clearly later.
    """
    _, slope = lines.capacity(start)
    communicates = (crossing_time > start) & (crossing_time < full_time)
    after = 1.0 / lines.alpha_1
    crossed = (lines.alpha_1 > lines.alpha_2) & (crossing_time <= start)  # at the start itself both lines may be equal
    slope = np.where((slope > 0) & crossed, after, slope)
    open_at_start = slope > 0
    change = np.zeros(len(times) + 1)
    np.add.at(change, np.searchsorted(times, crossing_time[communicates]), (after - slope)[communicates])
    closing = np.where(communicates, after, slope)
    np.add.at(change, np.searchsorted(times, full_time[open_at_start]), -closing[open_at_start])
    slopes = -np.cumsum(change[:0:-1])[::-1]
    sizes = np.concatenate([[0.0], np.cumsum(np.diff(times) * slopes[:-1])])
    anchor = min(int(np.searchsorted(times, start * (1.0 + 1e-6))), len(times) - 1)
    return np.asarray(np.maximum.accumulate(sizes + (lines.capacity(float(times[anchor]))[0].sum() - sizes[anchor])))


def static_sizes(
    total_batch_size: int,
    capacities: Sequence[float],
    *,
    min_local: Bound = 1,
    max_local: Bound | None = None,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Split in proportion to known capacities, CPU cores or peak FLOP/s, open-loop (D sec. III-B).

    Args:
        total_batch_size: ``B``.
        capacities: cores or FLOP/s of each worker, ``> 0``, all in one unit.
        min_local: fewest samples of a worker.
        max_local: most samples of a worker.
        multiple: samples of which each size is a multiple.

    Returns:
        One size per worker, sum ``B``.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if the bounds cannot be met, or the capacities are empty, negative, not finite, or all zero.

    Example:
        >>> static_sizes(64, [8, 4, 4])
        (32, 16, 16)
    """
    total = check_int("total_batch_size", total_batch_size, minimum=1)
    if len(capacities) == 0:
        raise ValueError("capacities is empty; give one per worker: its CPU cores or peak FLOPs.")
    low, high = check_bounds(len(capacities), total, min_local, max_local, multiple)
    units = proportional_sizes(total // multiple, capacities, min_local=low, max_local=high)
    return tuple(multiple * size for size in units)
