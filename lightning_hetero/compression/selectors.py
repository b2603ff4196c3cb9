"""Selectors of the blocks to send, on CPU: four of them, in one table, which use the scores of this step.

All return ascending numbers, each once, never more than ``k``, none with a score of 0. ``"exact"`` and ``"histogram"``
take at least 95 % of the mass of the exact top-k in every step. With ``"sample"``, that depends on the sample, and
``"aimd"`` is the paper's controller, which falls behind under error feedback (``tests/kernels/test_messages.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SELECT", "Indices", "Scores", "SelectorState", "at_least"]

Indices = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating]


@dataclass(frozen=True)
class SelectorSettings:
    """Constants of the selectors.

    Args:
        sample_size: scores from which a quantile is taken.
        candidate_shares: shares of the last step's threshold, tried one after the other, that candidates have to reach.
        max_candidates: most candidates to process, in multiples of the budget.
        oversampling: multiples of the budget, tried one after the other, that a quantile should give; the first one
            uses a quarter of the sample.
        aimd_step: step of the paper's threshold, upward as a share of its first value, downward of itself.
    """

    sample_size: int = 65_536
    candidate_shares: tuple[float, ...] = (0.98, 0.93, 0.8)
    max_candidates: int = 6
    oversampling: tuple[float, ...] = (1.15, 1.15, 2.0, 8.0)
    aimd_step: float = 0.01


SETTINGS = SelectorSettings()


@dataclass
class SelectorState:
    """State of a selector from step to step.

    Args:
        rng: draws the positions at which scans begin.
        first: first threshold of ``"aimd"``, 0 before it has one.
        threshold: threshold of ``"aimd"``; for ``"exact"``, the least score that it took in the last step.
    """

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    first: float = 0.0
    threshold: float = 0.0

    def begin(self, threshold: float) -> None:
        """Set the first threshold of ``"aimd"``, of which its upward step is a share."""
        self.first = self.threshold = threshold

    def aim(self, threshold: float) -> None:
        """Set the threshold of the next step."""
        self.threshold = threshold

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        state = self.rng.bit_generator.state
        words = [str(state["state"][key]) for key in ("state", "inc")]  # 128 bits, too many for some readers
        buffered = [int(state["has_uint32"]), int(state["uinteger"])]
        return {"first": float(self.first), "threshold": float(self.threshold), "rng": words, "buffered": buffered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.first, self.threshold = state["first"], state["threshold"]
        inner = dict(self.rng.bit_generator.state)
        inner["state"] = dict(zip(("state", "inc"), map(int, state["rng"]), strict=True))
        inner["has_uint32"], inner["uinteger"] = state["buffered"]
        self.rng.bit_generator.state = inner


def _reached(scores: Scores, threshold: float) -> npt.NDArray[np.bool_]:
    """Return whether each score reaches a threshold and is above 0."""
    reached: npt.NDArray[np.bool_] = scores >= threshold if threshold > 0 else scores > 0
    return reached


def at_least(scores: Scores, threshold: float, most: int) -> Indices | None:
    """Return the numbers of scores that reach a threshold and are above 0; ``None`` if there are more than ``most``."""
    reached = _reached(scores, threshold)
    return None if np.count_nonzero(reached) > most else np.flatnonzero(reached)


AtLeast = Callable[[Scores, float, int], Indices | None]


def _quantile(scores: Scores, wanted: float, size: int) -> float:
    """Return the score that about ``wanted`` blocks reach, from a strided sample; 0 if it is too small to tell."""
    stride = max(1, len(scores) // size)
    sample = scores[::stride]
    rank = int(np.ceil(wanted / stride))
    return float(np.partition(sample, len(sample) - rank)[len(sample) - rank]) if rank < len(sample) else 0.0


def _sampled(scores: Scores, k: int, search: AtLeast) -> Indices:
    """Return candidates for the ``k`` largest scores, in most cases few: from samples, else all scores above 0."""
    for number, factor in enumerate(SETTINGS.oversampling):
        size = SETTINGS.sample_size // (1 if number else 4)
        most = SETTINGS.max_candidates * k if factor < SETTINGS.max_candidates else len(scores)
        candidates = search(scores, _quantile(scores, factor * k + 3, size), most)
        if candidates is not None and len(candidates) >= k:
            return candidates
    return np.flatnonzero(scores > 0)


def exact(scores: Scores, k: int, state: SelectorState, search: AtLeast = at_least) -> Indices:
    """Return the blocks with the ``k`` largest scores, by partition of a few candidates.

    Candidates are the scores above a threshold a little below the least score that the last step chose, then one well
    below it. If these are too few or far too many, as when the gradient changes suddenly, a sample gives the threshold.
    """
    candidates: Indices | None = None
    for share in SETTINGS.candidate_shares if state.threshold > 0 else ():
        candidates = search(scores, share * state.threshold, SETTINGS.max_candidates * k)
        if candidates is None or len(candidates) >= k:
            break
    if candidates is None or len(candidates) < k:
        candidates = _sampled(scores, k, search)
    held = scores[candidates]
    if len(held) < max(k, 1):
        state.aim(0.0)
        return candidates
    least = np.partition(held, len(held) - k)[len(held) - k].item()
    state.aim(least)
    taken = held > least
    taken[np.flatnonzero(held == least)[: k - np.count_nonzero(taken)]] = True
    return candidates[taken]


def histogram(scores: Scores, k: int, state: SelectorState) -> Indices:
    """Return the blocks above the histogram bin of the k-th largest, then an even share of the blocks of that bin.

    Of that bin's ``e`` blocks, with ``q`` still wanted, the ``j``-th is taken if ``floor(j q / e)`` grows there. In the
    plain order of the tensor, its end would always be sent later than its beginning. A bin is the upper 16 bits of the
    float32 score, 0.4 to 0.8 % wide. The Triton kernels do the same.
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
    """Return the blocks above the quantile of a sample; if they are too many, a part from a random position on."""
    return _cut(np.flatnonzero(_reached(scores, _quantile(scores, k, SETTINGS.sample_size))), k, state)


def aimd(scores: Scores, k: int, state: SelectorState) -> Indices:
    """Return the blocks above the paper's threshold.

    It rises by 1 % of its first value if the budget was filled, and falls by 1 % of itself if not.
    """
    if state.first == 0.0 and len(scores):
        state.begin(float(np.partition(scores, len(scores) - k)[len(scores) - k]))
    chosen = _cut(np.flatnonzero(_reached(scores, state.threshold)), k, state)
    step = SETTINGS.aimd_step
    filled = len(chosen) == k
    state.aim(state.threshold + step * state.first if filled else (1 - step) * state.threshold)
    return chosen


def _cut(candidates: Indices, k: int, state: SelectorState) -> Indices:
    """Return the first ``k`` candidates from a random position on, so that no part of the tensor starves."""
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
