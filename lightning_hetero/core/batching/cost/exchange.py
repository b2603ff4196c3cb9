"""Improvement of a cut by moving or exchanging single samples between the last worker and the others."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.cost.problem import CutProblem

__all__ = ["improved"]

Array = npt.NDArray[np.float64]

ROUNDS = 8
"""Most moves or exchanges."""
LEAST_GAIN = 0.002
"""Gain, as a share of the time, below which no move is made."""


def improved(problem: CutProblem, shares: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return shares whose longest time is not longer: each round moves or exchanges one sample of the last worker.

    Args:
        problem: the batch that is cut.
        shares: samples of each worker, as places in the problem's order.

    Example:
        >>> from lightning_hetero.core.batching.cost.weights import CostWeights
        >>> problem = CutProblem.of([1.0, 2.0, 2.0, 3.0], [4, 4], CostWeights.of("cost"), None, None)
        >>> improved(problem, [[0, 1], [2, 3]])
        [[1, 2], [0, 3]]
    """
    current = [sorted(share) for share in shares]
    times = [problem.time(k, share) for k, share in enumerate(current)]
    bound = problem.least_time()
    for _ in range(ROUNDS):
        last = max(range(len(times)), key=times.__getitem__)
        goal = times[last] * (1.0 - LEAST_GAIN)
        if goal < bound:
            break
        best: tuple[float, int, int, int | None] | None = None
        for other in range(len(times)):
            if other != last and times[other] < goal:
                found = _best_step(problem, last, current[last], other, current[other])
                if found is not None and found[0] < (goal if best is None else best[0]):
                    best = (found[0], other, found[1], found[2])
        if best is None:
            break
        _, other, given, back = best
        current[last].remove(given)
        current[other] = sorted([*current[other], given])
        if back is not None:
            current[other].remove(back)
            current[last] = sorted([*current[last], back])
        for k in (last, other):
            times[k] = problem.time(k, current[k])
    return current


def _best_step(
    problem: CutProblem, last: int, own: list[int], other: int, others: list[int]
) -> tuple[float, int, int | None] | None:
    """Return the best move or exchange between two workers: the later of both times, what moves, what comes back."""
    give, take = _Side(problem, last, own), _Side(problem, other, others)
    candidates: list[tuple[float, int, int | None]] = []
    if len(own) > problem.low[last] and len(others) < problem.high[other]:
        left = give.time(give.sum - give.added, len(own) - 1, give.without)
        joined = take.time(take.sum + give.added, len(others) + 1, np.maximum(take.longest, give.padding))
        later = np.maximum(left, joined)
        k = int(later.argmin())
        candidates.append((float(later[k]), own[k], None))
    if own and others:
        change = give.added[:, None] - take.added[None, :]
        left = give.time(give.sum - change, len(own), np.maximum(give.without[:, None], take.padding[None, :]))
        joined = take.time(take.sum + change, len(others), np.maximum(take.without[None, :], give.padding[:, None]))
        later = np.maximum(left, joined)
        k, back = divmod(int(later.argmin()), len(others))
        candidates.append((float(later[k, back]), own[k], others[back]))
    return min(candidates, default=None, key=lambda step: step[0])


class _Side:
    """One worker's share in arrays."""

    def __init__(self, problem: CutProblem, worker: int, share: list[int]) -> None:
        self.added = np.array([problem.added[i] for i in share])
        self.padding = np.array([problem.padding[i] for i in share])
        self.sum = float(self.added.sum())
        self.longest = problem.padding[share[-1]] if share else 0.0
        self.without = np.full(len(share), self.longest)  # longest of the others: the share is sorted
        if share:
            self.without[-1] = self.padding[-2] if len(share) > 1 else 0.0
        self._fixed, self._span = problem.fixed[worker], problem.span[worker]

    def time(self, added: Array, number: int, longest: Array) -> Array:
        return np.asarray((self._fixed + added + number * longest) / self._span)
