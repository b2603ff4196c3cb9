"""Cut of a global batch into shares of unequal samples that all workers finish at the same time.

The cost of a share ``S`` of ``n`` samples is ``c(S) = sum_{s in S} a_s + n max_{s in S} m_s``: ``a`` adds up, ``m`` is
what padding to the longest sample costs. Worker ``i`` takes ``(h_i + c(S_i)) / (h_i + b_i)`` of its planned time, and
:func:`cut` minimises the largest of these. To divide sets in the best way is NP-hard even without padding; this is a
heuristic, tested against the exact optimum of small batches.

With padding, samples are sorted and shares are blocks of the sorted order: for a given time, each worker takes as many
samples as it can, and a binary search finds the least time in which all samples are taken. Without it, the longest
sample goes to the worker that is done first with it. Moves and exchanges of single samples then improve either.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.cost.exchange import improved
from lightning_hetero.core.batching.cost.problem import CutProblem
from lightning_hetero.core.batching.cost.weights import CostWeights

__all__ = ["cut", "finish_times"]

Array = npt.NDArray[np.float64]

CLOSE = 1.002
"""Ratio of the bounds of the time at which the search ends."""
BEST_ORDERS = 3
"""Orders of the workers whose blocks are improved by moves and exchanges."""


def cut(
    costs: Sequence[float] | Array,
    sizes: Sequence[int],
    weights: CostWeights,
    *,
    low: Sequence[int] | None = None,
    high: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the positions of each worker's samples, such that the last worker is done as early as possible.

    Args:
        costs: cost of each sample of the global batch, ``>= 0``.
        sizes: planned work of each worker in average samples, ``b_i``; a worker with 0 gets no sample.
        weights: cost of a share, and fixed work of the workers.
        low: fewest samples of each worker with a size above 0; 1 by default.
        high: most samples of each worker, ``>= sizes``; no limit by default.

    Raises:
        ValueError: if the bounds do not allow the number of samples.

    Example:
        >>> cut([5.0, 1.0, 1.0, 1.0, 2.0], [2, 2], CostWeights.of("cost"))
        [[0], [1, 2, 3, 4]]
    """
    problem = CutProblem.of(costs, sizes, weights, low, high)
    if weights.pads:
        blocks = sorted((_blocks(problem, order) for order in _orders(problem)), key=problem.longest)
        found = min((improved(problem, one) for one in blocks[:BEST_ORDERS]), key=problem.longest)
    else:
        found = improved(problem, _longest_first(problem))
    shares: list[list[int]] = [[] for _ in sizes]
    for worker, share in zip(problem.workers, found, strict=True):
        shares[worker] = sorted(problem.positions[i] for i in share)
    return shares


def finish_times(
    costs: Sequence[float] | Array, shares: Sequence[Sequence[int]], sizes: Sequence[int], weights: CostWeights
) -> Array:
    """Return the time of each worker for its share, relative to that for its planned work; 0 for one without a share.

    Args:
        costs: cost of each sample of the global batch.
        shares: positions of each worker's samples.
        sizes: planned work of each worker.
        weights: cost of a share, and fixed work of the workers.

    Example:
        >>> finish_times([1.0, 3.0, 2.0], [[0, 1], [2]], [2, 2], CostWeights.of("padded_cost")).tolist()
        [3.0, 1.0]
    """
    problem = CutProblem.of(costs, sizes, weights, [0] * len(sizes), None)
    place = {position: i for i, position in enumerate(problem.positions)}
    times = np.zeros(len(sizes))
    for k, worker in enumerate(problem.workers):
        times[worker] = problem.time(k, [place[position] for position in shares[worker]])
    return times


def _orders(problem: CutProblem) -> list[tuple[int, ...]]:
    """Return the orders in which workers take blocks: all of up to 3 workers, else by speed in both directions."""
    workers = range(len(problem.workers))
    if len(workers) <= 3:
        return list(permutations(workers))
    slow_first = tuple(sorted(workers, key=lambda k: problem.span[k]))
    return [slow_first, slow_first[::-1]]


def _blocks(problem: CutProblem, order: Sequence[int]) -> list[list[int]]:
    """Return the shares if workers take blocks of the sorted samples in a given order."""
    below, above, best = problem.least_time(), np.inf, _by_count(problem, order)
    above = problem.longest(best)
    while above > CLOSE * below:
        time = (below * above) ** 0.5
        found = _filled(problem, order, time)
        if found is None:
            below = time
        else:
            best, above = found, min(time, problem.longest(found))
    return best


def _by_count(problem: CutProblem, order: Sequence[int]) -> list[list[int]]:
    """Return blocks of sizes within the bounds, as near to the plan as they allow."""
    shares: list[list[int]] = [[] for _ in order]
    start, rest = 0, problem.number - sum(problem.low)
    for k in order:
        more = min(rest, max(0, problem.sizes[k] - problem.low[k]), problem.high[k] - problem.low[k])
        shares[k] = [start, start + problem.low[k] + more]
        start, rest = shares[k][1], rest - more
    for k in reversed(order):  # what is left goes to those that have room
        more = min(rest, problem.high[k] - (shares[k][1] - shares[k][0]))
        rest -= more
        for later in order[order.index(k) :]:
            shares[later] = [shares[later][0] + (more if later != k else 0), shares[later][1] + more]
    return [list(range(*share)) for share in shares]


def _filled(problem: CutProblem, order: Sequence[int], time: float) -> list[list[int]] | None:
    """Return blocks that all take ``time`` at most, ``None`` if there are none in this order."""
    summed, padding = problem.summed, problem.padding
    shares: list[list[int]] = [[] for _ in order]
    begins = _latest_begins(problem, order, time)
    if begins is None:
        return None
    start = 0
    for k, latest in zip(order, begins, strict=True):
        least, most = problem.low[k], min(latest, start + problem.high[k])
        limit = time * problem.span[k] - problem.fixed[k]
        if start + least > most:
            return None
        base = limit + summed[start]
        begin = start  # for the function below
        end = start + bisect_right(
            range(start + 1, most + 1),
            base,
            key=lambda e: summed[e] + (e - begin) * padding[e - 1],
        )
        if end - start < least:
            return None
        shares[k] = [start, end]
        start = end
    return [list(range(*share)) for share in shares] if start == problem.number else None


def _latest_begins(problem: CutProblem, order: Sequence[int], time: float) -> list[int] | None:
    """Return the last place at which each worker's successor may begin, such that it can take its fewest samples.

    The cheaper the samples with which a worker begins, the more it can take, so each leaves cheap ones to the next.
    """
    summed, padding = problem.summed, problem.padding
    begins, last = [], problem.number
    for k in reversed(order):
        begins.append(last)
        least = problem.low[k]
        limit = time * problem.span[k] - problem.fixed[k]
        places = range(last - least + 1)
        if least:
            last = bisect_right(
                places,
                limit,
                key=lambda s, n=least: summed[s + n] - summed[s] + n * padding[s + n - 1],  # type: ignore[misc]
            )
            last -= 1
        if last < 0:
            return None
    return begins[::-1]


def _longest_first(problem: CutProblem) -> list[list[int]]:
    """Return the shares if the longest sample is given first, each to the worker that is then done first."""
    workers = range(len(problem.workers))
    loads, needed = list(problem.fixed), list(problem.low)
    shares: list[list[int]] = [[] for _ in workers]
    open_places = sum(needed)
    for sample in range(problem.number - 1, -1, -1):
        cost, forced, best, least = problem.added[sample], sample < open_places, -1, np.inf
        for k in workers:
            if len(shares[k]) < problem.high[k] and (needed[k] > 0 or not forced):
                time = (loads[k] + cost) / problem.span[k]
                if time < least:
                    best, least = k, time
        shares[best].append(sample)
        loads[best] += cost
        if needed[best] > 0:
            needed[best] -= 1
            open_places -= 1
    return shares
