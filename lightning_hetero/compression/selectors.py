"""Which blocks are sent, on CPU: four selectors over the scores of this step, in one table.

All return ascending numbers, each once, never more than ``k``, none with a score of 0. ``"exact"`` and ``"histogram"``
take at least 95 % of the mass of the exact top-k in every step; ``"sample"`` depends on luck with its sample, and
``"aimd"`` is the paper's controller, which falls behind under error feedback (``tests/compression/test_selectors.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SELECT", "Indices", "Scores", "SelectorState", "at_least"]

Indices = npt.NDArray[np.int64]
Scores = npt.NDArray[Any]

SAMPLE = 65_536

NEAR, MANY = (0.98, 0.93, 0.8), 6
"""What shares of the last threshold candidates reach, and how many times the budget they may be."""


@dataclass
class SelectorState:
    """What a selector remembers from step to step.

    Args:
        rng: where scans begin.
        first: first threshold of ``"aimd"``, 0 before it has one.
        threshold: that of ``"aimd"``; of ``"exact"``, the least score that it took in the last step.
    """

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    first: float = 0.0
    threshold: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint."""
        state = self.rng.bit_generator.state
        words = [str(state["state"][key]) for key in ("state", "inc")]  # 128 bits, more than every reader takes
        buffered = [int(state["has_uint32"]), int(state["uinteger"])]
        return {"first": float(self.first), "threshold": float(self.threshold), "rng": words, "buffered": buffered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as :meth:`state_dict` described."""
        self.first, self.threshold = state["first"], state["threshold"]
        inner = dict(self.rng.bit_generator.state)
        inner["state"] = dict(zip(("state", "inc"), map(int, state["rng"]), strict=True))
        inner["has_uint32"], inner["uinteger"] = state["buffered"]
        self.rng.bit_generator.state = inner


def _reached(scores: Scores, threshold: float) -> npt.NDArray[np.bool_]:
    """Which scores reach a threshold and are above 0."""
    reached: npt.NDArray[np.bool_] = scores >= threshold if threshold > 0 else scores > 0
    return reached


def at_least(scores: Scores, threshold: float, most: int) -> Indices | None:
    """Numbers of the scores that reach a threshold and are above 0; ``None`` if these are more than ``most``."""
    reached = _reached(scores, threshold)
    return None if np.count_nonzero(reached) > most else np.flatnonzero(reached)


AtLeast = Callable[[Scores, float, int], Indices | None]


def _quantile(scores: Scores, wanted: float, least: int) -> float:
    """Score that about ``wanted`` blocks reach, from a strided sample; 0 if the sample is too small to tell."""
    stride = max(1, len(scores) // least)
    sample = scores[::stride]
    rank = int(np.ceil(wanted / stride))
    return float(np.partition(sample, len(sample) - rank)[len(sample) - rank]) if rank < len(sample) else 0.0


def _sampled(scores: Scores, k: int, search: AtLeast) -> Indices:
    """Candidates for the ``k`` largest scores, few in most cases: by samples, then all of them."""
    for factor, least in ((1.15, SAMPLE // 4), (1.15, SAMPLE), (2.0, SAMPLE), (8.0, SAMPLE)):
        most = MANY * k if factor < MANY else len(scores)
        candidates = search(scores, _quantile(scores, factor * k + 3, least), most)
        if candidates is not None and len(candidates) >= k:
            return candidates
    return np.flatnonzero(scores > 0)


def exact(scores: Scores, k: int, state: SelectorState, search: AtLeast = at_least) -> Indices:
    """The ``k`` largest scores: candidates, and a partition of these few.

    Candidates are the scores a little below the least one of the last step's choice, then those well below it. Where
    these are too few or many times too many, as when the gradient changes suddenly, a sample says where to look.
    """
    candidates: Indices | None = None
    for share in NEAR if state.threshold > 0 else ():
        candidates = search(scores, share * state.threshold, MANY * k)
        if candidates is None or len(candidates) >= k:
            break
    if candidates is None or len(candidates) < k:
        candidates = _sampled(scores, k, search)
    held = scores[candidates]
    if len(held) < max(k, 1):
        state.threshold = 0.0
        return candidates
    state.threshold = least = np.partition(held, len(held) - k)[len(held) - k].item()
    taken = held > least
    taken[np.flatnonzero(held == least)[: k - np.count_nonzero(taken)]] = True
    return candidates[taken]


def histogram(scores: Scores, k: int, state: SelectorState) -> Indices:
    """The blocks above the histogram bin in which the k-th largest lies, then blocks of that bin, an even share of it.

    Of its ``e`` blocks the ``j``-th is taken where ``floor(j q / e)`` grows, with ``q`` still wanted. Taken in the
    order of the tensor, its end would be sent later than its beginning all the time. A bin is the upper 16 bits of the
    float32 score, 0.4 to 0.8 % wide. This is what the Triton kernels do.
    """
    keys = np.ascontiguousarray(scores, dtype=np.float32).view(np.uint32) >> 16
    counts = np.bincount(keys, minlength=1)
    above = counts[::-1].cumsum()[::-1]  # blocks with this key or a higher one
    reached = np.flatnonzero(above >= k)
    edge = int(reached[-1]) if len(reached) else 0
    sure = np.flatnonzero(keys > edge)
    fill = np.flatnonzero((keys == edge) & (scores > 0))
    quota = k - len(sure)
    if len(fill) > quota:
        reached_by = np.arange(len(fill) + 1) * quota // len(fill)
        fill = fill[np.diff(reached_by) > 0]
    return np.sort(np.concatenate([sure, fill]))


def sample(scores: Scores, k: int, state: SelectorState) -> Indices:
    """Blocks above the quantile of a sample; too many are cut at random, too few are left too few."""
    return _cut(np.flatnonzero(_reached(scores, _quantile(scores, k, SAMPLE))), k, state)


def aimd(scores: Scores, k: int, state: SelectorState) -> Indices:
    """The paper's threshold: up by 1 % of its first value when the budget was filled, down by 1 % when not."""
    if state.first == 0.0 and len(scores):
        state.first = state.threshold = float(np.partition(scores, len(scores) - k)[len(scores) - k])
    chosen = _cut(np.flatnonzero(_reached(scores, state.threshold)), k, state)
    state.threshold = state.threshold + 0.01 * state.first if len(chosen) == k else 0.99 * state.threshold
    return chosen


def _cut(candidates: Indices, k: int, state: SelectorState) -> Indices:
    """The first ``k`` candidates of a scan that begins at random, so that no part of the tensor starves."""
    if len(candidates) <= k:
        return candidates
    chosen = np.roll(candidates, -int(state.rng.integers(len(candidates))))[:k]
    chosen.sort()
    return chosen


SELECT: dict[str, Callable[[Scores, int, SelectorState], Indices]] = {
    "exact": exact,
    "histogram": histogram,
    "sample": sample,
    "aimd": aimd,
}
