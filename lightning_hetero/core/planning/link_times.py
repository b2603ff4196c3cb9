"""Times of the gradient all-reduce by the number of workers: ``gamma``, ``t_o`` and ``t_u`` (C eq. 12)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, steps_that_tell

ROUNDS = 8
"""Rounds whose median counts."""
Round = tuple[float, float, float]


@dataclass(frozen=True)
class LinkTimes:
    """Times of the all-reduce in the newest rounds.

    Args:
        rounds: ``gamma``, ``t_o`` and ``t_u`` of the newest rounds, by the number of workers, newest last.

    Example:
        >>> LinkTimes({4: ((0.1, 0.3, 0.03),)}).at(2)
        (0.1, 0.2, 0.02)
    """

    rounds: Mapping[int, tuple[Round, ...]] = field(default_factory=dict)

    def observe(self, seen: StepObservations, accumulation: int = 1) -> "LinkTimes":
        """Return the times after one more round, of steps with this many micro-batches."""
        workers = seen.forward.shape[1]
        newest = (
            estimate_gamma(seen.first_bucket, seen.backward),
            *estimate_sync_times(seen.overlapped_sync, seen.last_sync, steps_that_tell(seen, accumulation)),
        )
        return replace(self, rounds={**self.rounds, workers: (*self.rounds.get(workers, ()), newest)[-ROUNDS:]})

    def at(self, workers: int) -> tuple[float, float, float]:
        """Return ``gamma``, ``t_o`` and ``t_u`` of a number of workers.

        Of a number not seen so far by the ring model, ``latency (n - 1) + transfer (n - 1) / n`` with both ``>= 0``.
        """
        seen = {n: np.median(np.array(rounds), axis=0) for n, rounds in self.rounds.items()}
        if workers in seen:
            return tuple(map(float, seen[workers]))  # type: ignore[return-value]
        gamma = float(np.median([one[0] for one in seen.values()])) if seen else 1.0
        n = np.array([float(count) for count in seen if count > 1])
        if not len(n):
            return gamma, 0.0, 0.0
        from scipy.optimize import nnls  # slow to import, and only a restart with other workers needs it

        ring = np.stack([(n - 1) / n, n - 1], axis=1)[:, : len(n)]
        there = np.array([(workers - 1) / workers, workers - 1.0])[: len(n)]
        t_o, t_u = (float(nnls(ring, np.array([seen[int(count)][i] for count in n]))[0] @ there) for i in (1, 2))
        return gamma, round(t_o, 12), round(t_u, 12)

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {str(n): [list(one) for one in rounds] for n, rounds in self.rounds.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "LinkTimes":
        """Return the times restored from :meth:`state_dict`."""
        return cls({int(n): tuple((float(g), float(o), float(u)) for g, o, u in rounds) for n, rounds in state.items()})
