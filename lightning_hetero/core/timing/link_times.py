"""Times of the gradient all-reduce: estimates of ``gamma``, ``t_o`` and ``t_u`` (C eq. 12), by number of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.fitting import estimate_gamma, estimate_sync_times, steps_that_tell
from lightning_hetero.core.timing.times import ESTIMATOR_DEFAULTS, EstimatorSettings

__all__ = ["Level", "LinkTimes"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Level:
    """Scalar Kalman filter of a number that walks randomly and sometimes jumps.

    Args:
        value: estimate.
        variance: of the estimate, relative to ``scale ** 2`` of :meth:`observe`; infinite before the first observation.

    Example:
        >>> level = Level().observe(1.0, 0.01)
        >>> round(level.observe(1.1, 0.01).value, 2), level.observe(3.0, 0.01).value
        (1.05, 3.0)
    """

    value: float = 0.0
    variance: float = float("inf")

    def observe(
        self,
        seen: float,
        variance: float,
        scale: float | None = None,
        *,
        jumps: bool = True,
        settings: EstimatorSettings = ESTIMATOR_DEFAULTS,
    ) -> "Level":
        """Return the level after one more round.

        Args:
            seen: value observed in the round.
            variance: variance of ``seen``, relative to the square of the scale.
            scale: scale of the number; by default the number itself.
            jumps: whether the level follows a single round that is far off.
            settings: of the estimator; those of the link are used.
        """
        scale = max(abs(self.value), abs(seen), 1e-9) if scale is None else scale
        noise, before = variance + settings.link_rounds**2, self.variance + settings.link_walk**2
        off = (seen - self.value) / scale
        if not np.isfinite(before) or (jumps and off**2 > settings.link_jump**2 * (before + noise)):
            return Level(float(seen), noise)
        gain = before / (before + noise)
        return Level(float(self.value + gain * off * scale), float((1.0 - gain) * before))

    def below(self, bound: float, settings: EstimatorSettings = ESTIMATOR_DEFAULTS) -> "Level":
        """Return the level after a round that gave only an upper bound."""
        if not np.isfinite(self.variance):
            return Level(bound, settings.link_bound_error**2)
        if bound >= self.value:
            return replace(self, variance=self.variance + settings.link_walk**2)
        return self.observe(bound, settings.link_jitter**2, jumps=False, settings=settings)

    def far_above(self, bound: float, steps: int, settings: EstimatorSettings = ESTIMATOR_DEFAULTS) -> bool:
        """Return whether the median of upper bounds of some steps is so far below that the number must have fallen."""
        noise = 1.5 * settings.link_jitter**2 / steps + settings.link_rounds**2
        deviation = (self.variance + settings.link_walk**2 + noise) ** 0.5
        return bool(np.isfinite(deviation) and self.value - bound > settings.link_jump * deviation * self.value)

    def state(self) -> list[float | None]:
        """Return value and variance; ``None`` for an infinite one, which JSON does not have."""
        return [self.value, self.variance if np.isfinite(self.variance) else None]

    @classmethod
    def of(cls, state: Sequence[float | None]) -> "Level":
        """Return the level that :meth:`state` described."""
        value, variance = (float("inf") if number is None else float(number) for number in state)
        return cls(value, variance)


@dataclass(frozen=True)
class LinkTimes:
    """Times of the all-reduce, by the number of workers that share the link.

    Args:
        gamma: share of the backward pass before the first bucket.
        sync: ``(t_o, t_u)`` for each number of workers seen so far.

    Example:
        >>> known = LinkTimes(sync={4: (Level(0.3, 0.0), Level(0.03, 0.0))})
        >>> [round(seconds, 3) for seconds in known.at(2)], known.at(1)
        ([0.2, 0.02], (0.0, 0.0))
    """

    gamma: Level = Level()
    sync: Mapping[int, tuple[Level, Level]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sync)

    def observe(
        self, seen: StepObservations, accumulation: int = 1, settings: EstimatorSettings = ESTIMATOR_DEFAULTS
    ) -> "LinkTimes":
        """Return the times after one more sync round, whose steps have ``accumulation`` micro-batches each."""
        steps, workers = seen.forward.shape
        gamma = self.gamma.observe(
            estimate_gamma(seen.first_bucket, seen.backward), 0.01 / steps, 1.0, settings=settings
        )
        tells = steps_that_tell(seen, accumulation, settings)
        t_o, t_u = estimate_sync_times(seen.overlapped_sync, seen.last_sync, tells)
        before = self.sync.get(workers, (Level(), Level()))
        least = seen.overlapped_sync.min(axis=1)
        bound = float(np.median(least))  # the least time of every step is one
        if tells.sum() < settings.link_few_steps <= steps and before[0].far_above(bound, steps, settings):
            overlapped = Level().below(bound, settings)
        elif tells.any():
            overlapped = _followed(before[0], t_o, least[tells], settings)
        else:
            overlapped = before[0].below(t_o, settings)
        last = _followed(before[1], t_u, seen.last_sync.min(axis=1), settings)
        return replace(self, gamma=gamma, sync={**self.sync, workers: (overlapped, last)})

    def at(self, workers: int) -> tuple[float, float]:
        """Return ``(t_o, t_u)`` of ``workers`` workers.

        For a number of workers not seen so far, the ring model ``T = latency (n - 1) + transfer (n - 1) / n`` is fitted
        to the numbers that were: both coefficients from two or more numbers, only the transfer from one.

        Raises:
            ValueError: if no number of workers was seen.
        """
        if workers in self.sync:
            t_o, t_u = self.sync[workers]
            return t_o.value, t_u.value
        if not self.sync:
            raise ValueError("no synchronisation was seen yet.")
        n = np.array(sorted(count for count in self.sync if count > 1), dtype=float)
        return self._through(n, 0, workers), self._through(n, 1, workers)

    def _through(self, n: Array, which: int, workers: int) -> float:
        seconds = np.array([self.sync[int(count)][which].value for count in n])
        transfer, target = (n - 1) / n, (workers - 1) / workers
        if len(n) == 0:  # workers that ran alone have nothing to average
            return 0.0
        basis = np.stack([n - 1, transfer], axis=1)
        best = float(transfer @ seconds / (transfer @ transfer)) * target
        if len(n) >= 2:
            latency, moved = np.linalg.lstsq(basis, seconds, rcond=None)[0]
            if latency >= 0 and moved >= 0:
                best = float(latency * (workers - 1) + moved * target)
            elif moved < 0:
                best = float((n - 1) @ seconds / ((n - 1) @ (n - 1))) * (workers - 1)
        return best

    def error(self, workers: int) -> float:
        """Return the standard error of ``t_o + t_u``: the whole sum if that number of workers was not seen."""
        levels = self.sync.get(workers)
        if levels is None:
            return sum(self.at(workers)) if self.sync else float("inf")
        return float(np.sqrt(sum(level.value**2 * level.variance for level in levels)))

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {"gamma": self.gamma.state(), "sync": {n: [o.state(), u.state()] for n, (o, u) in self.sync.items()}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "LinkTimes":
        """Return the times restored from :meth:`state_dict`."""
        sync = {int(n): (Level.of(o), Level.of(u)) for n, (o, u) in state["sync"].items()}
        return cls(Level.of(state["gamma"]), sync)


def _followed(level: Level, value: float, samples: Array, settings: EstimatorSettings) -> Level:
    """Return the level after a round with the median ``value`` of ``samples``."""
    jitter = min(1.4826 * float(np.median(np.abs(samples - value))) / max(value, 1e-9), 1.0)
    few = len(samples) < settings.link_few_steps
    variance = 1.5 * (max(jitter, settings.link_jitter) if few else jitter) ** 2 / len(samples)
    return level.observe(value, variance, max(level.value, value, 1e-6), jumps=not few, settings=settings)
