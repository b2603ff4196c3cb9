"""What is known of one worker: its timings at each batch size seen so far, kept small, current, and portable.

A profile belongs to a piece of hardware, not to a rank, so that it survives a restart with another number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lightning_hetero.core.pace import capped, pace
from lightning_hetero.core.time_model import NodeTimeModel, fit_node

__all__ = ["NodeProfile", "ProfilePoint"]

MAX_POINTS = 16
MAX_WEIGHT = 64.0
FADE = 0.9
MIN_WEIGHT = 0.5
FIXED_SHARE = 0.35
"""Standard deviation of the prior for the share of fixed time."""
LEAST_SCATTER = 0.002
FULL_WEIGHT = 8.0
"""Steps from which on more of them make a point no more certain: what is left is systematic."""
DRIFT = 0.15
DRIFT_STEPS = 5
DRIFT_UNSEEN = 0.4


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """Timings of one worker at one batch size.

    Args:
        size: samples.
        forward: ``a`` in seconds.
        backward: ``P`` in seconds.
        weight: how many steps stand behind it, fading with age.
        scatter: relative spread of single steps: their standard deviation, or 1.48 median absolute deviations if that
            is more.

    Example:
        >>> NodeProfile().observe(10, [0.01] * 5, [0.03] * 5).points
        (ProfilePoint(size=10, forward=0.01, backward=0.03, weight=5.0, scatter=0.002),)
    """

    size: int
    forward: float
    backward: float
    weight: float
    scatter: float = LEAST_SCATTER


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Timings of one worker over the batch sizes that it ran.

    Args:
        points: at most 16, newest last.
        drifted: whether the last observation contradicted what was known, so that the older points were rescaled.

    Example:
        >>> profile = NodeProfile().observe(10, [0.01] * 5, [0.03] * 5).observe(20, [0.02] * 5, [0.05] * 5)
        >>> model = profile.model()
        >>> round(model.q, 4), round(model.k, 4), round(model.m, 4)
        (0.001, 0.002, 0.01)
    """

    points: tuple[ProfilePoint, ...] = ()
    drifted: bool = False

    def observe(
        self, size: int, forward: Sequence[float] | np.ndarray, backward: Sequence[float] | np.ndarray
    ) -> "NodeProfile":
        """Profile with the steps of one window at one size added.

        The window counts by its pace, see :mod:`lightning_hetero.core.pace`. If that differs from what was known at
        this size by more than 15 % (40 % from what the model says of a size never run) and more than 2.5 times the
        scatter, the worker itself has changed: older points keep their shape and are rescaled by the ratio, so that
        the slope survives.

        Args:
            size: samples of these steps.
            forward: ``a`` of each step in seconds.
            backward: ``P`` of each step in seconds.
        """
        forward, backward = np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)
        new = _summary(int(size), forward, backward)
        ratio = self._change(new)
        kept = [
            replace(q, forward=q.forward * ratio, backward=q.backward * ratio, weight=max(q.weight * FADE, MIN_WEIGHT))
            for q in self.points
            if q.size != new.size
        ]
        old = self._at(new.size)
        if old is not None and ratio == 1.0:
            new = _merged(replace(old, weight=old.weight * FADE), new)
        return NodeProfile((*kept, new)[-MAX_POINTS:], ratio != 1.0)

    def _at(self, size: int) -> ProfilePoint | None:
        return next((point for point in self.points if point.size == size), None)

    def _change(self, new: ProfilePoint) -> float:
        """Ratio of the observed to the known time if the worker itself has changed, else 1."""
        known = self._at(new.size)
        if known is not None and known.weight >= 3:
            expected, limit, scatter = known.forward + known.backward, DRIFT, max(known.scatter, new.scatter)
        elif len(self.points) >= 2:
            expected, limit, scatter = self.model().compute_time(new.size), DRIFT_UNSEEN, new.scatter
        else:
            return 1.0
        limit = 1.0 + max(limit, 2.5 * scatter)
        ratio = (new.forward + new.backward) / max(expected, 1e-9)
        return 1.0 if new.weight < DRIFT_STEPS or 1 / limit <= ratio <= limit else ratio

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes seen so far."""
        return tuple(sorted(point.size for point in self.points))

    def model(self) -> NodeTimeModel:
        """Time model fitted to the points; through the origin while one size only is known.

        Points close to each other cannot tell slope from intercept under noise: then the prior holds that a worker's
        time is mostly in proportion to its samples, so that a slow worker is always relieved and thereby seen at
        another size.

        Raises:
            ValueError: if nothing was observed yet.
        """
        if not self.points:
            raise ValueError("nothing was observed of this worker yet.")
        return _fitted(self.points)

    def expected(self, size: int) -> float | None:
        """Seconds of a step at a size, ``None`` before that size or two others were seen.

        Example:
            >>> NodeProfile().observe(8, [0.1] * 4, [0.2] * 4).expected(9) is None
            True
        """
        known = self._at(size)
        if known is not None:
            return known.forward + known.backward
        return self.model().compute_time(size) if len(self.points) >= 2 else None

    def settled(self) -> "NodeProfile":
        """The same profile with its drift flag cleared."""
        return replace(self, drifted=False)

    def state_dict(self) -> list[list[float]]:
        """Plain Python values, fit for any checkpoint."""
        return [[q.size, q.forward, q.backward, q.weight, q.scatter] for q in self.points]

    @classmethod
    def from_state_dict(cls, state: Any) -> "NodeProfile":
        """The profile that :meth:`state_dict` described."""
        return cls(tuple(ProfilePoint(int(size), *map(float, rest)) for size, *rest in state))


@lru_cache(maxsize=4096)
def _fitted(points: tuple[ProfilePoint, ...]) -> NodeTimeModel:
    """The fit; kept, since one decision asks for it several times and it is most of what a decision costs."""
    size, forward, backward, weight, scatter = np.array(
        [(q.size, q.forward, q.backward, q.weight, q.scatter) for q in points], dtype=float
    ).T
    variance = scatter**2 * np.maximum(1.0, FULL_WEIGHT / weight)
    return fit_node(size, forward, backward, 1.0 / variance, fixed_share=FIXED_SHARE)


def _summary(size: int, forward: np.ndarray, backward: np.ndarray) -> ProfilePoint:
    """Pace and spread of the steps of one window."""
    every = forward + backward
    total = capped(every)
    spread = max(float(total.std()), 1.4826 * float(np.median(np.abs(every - np.median(every)))))
    return ProfilePoint(
        size,
        pace(forward),
        pace(backward),
        min(float(len(total)), MAX_WEIGHT),
        max(spread / max(float(total.mean()), 1e-12), LEAST_SCATTER),
    )


def _merged(old: ProfilePoint, new: ProfilePoint) -> ProfilePoint:
    """Two windows at one size, each with its weight."""
    weight = old.weight + new.weight

    def mean(x: float, y: float) -> float:
        return x + new.weight / weight * (y - x)

    return ProfilePoint(
        old.size,
        mean(old.forward, new.forward),
        mean(old.backward, new.backward),
        min(weight, MAX_WEIGHT),
        mean(old.scatter, new.scatter),
    )
