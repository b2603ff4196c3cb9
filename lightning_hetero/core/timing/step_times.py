"""Smoothed step times of each worker at the present sizes, and their errors (D sec. III-C).

The paper's moving average follows changes, but it stays as noisy as the mean of about twenty steps. The mean of all
steps at the present sizes is therefore kept as well, and used as long as the moving average agrees with it. Estimates
of a cluster that does not change thus become more precise with every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_fields, check_int

__all__ = ["SmoothingSettings", "StepTimes"]

Array = npt.NDArray[np.float64]

MEAN_DIFFERENCE = 1.128
"""Mean absolute difference of two normal values with standard deviation 1."""


@checked_keywords
@dataclass(frozen=True)
class SmoothingSettings:
    """Settings of :class:`StepTimes`.

    Args:
        noise_steps: number of newest differences between successive steps that measure the noise, ``>= 1``.
        longest_mean_steps: greatest number of steps in the mean, ``>= 1``.
        outlier_ratio: multiple of the median difference to which larger differences are limited, above 0.
        leaving_errors: standard errors by which the moving average has to leave the mean before the mean is dropped,
            ``>= 0``.

    Raises:
        TypeError: if a setting has the wrong type.
        ValueError: if a setting is out of its range.

    Example:
        >>> SmoothingSettings().noise_steps
        64
    """

    noise_steps: int = 64
    longest_mean_steps: int = 256
    outlier_ratio: float = 3.0
    leaving_errors: float = 5.0

    def __post_init__(self) -> None:
        for name in ("noise_steps", "longest_mean_steps"):
            check_int(f"SmoothingSettings.{name}", getattr(self, name), minimum=1)
        check_fields(self, ("outlier_ratio",), include_low=False)
        check_fields(self, ("leaving_errors",))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Compute times of all workers at one split, smoothed; replaced, never changed in place.

    Args:
        smoothed: ``mu_i``, exponential moving average in seconds; empty before the first step.
        weights: sum of the squared weights of single steps in ``smoothed``.
        mean: mean in seconds of the steps since the split, or a worker's speed, last changed.
        steps: steps behind ``mean``.
        count: steps behind ``smoothed``.
        newest: times of the last step in seconds.
        differences: ``|ln(t / t_before)|`` of successive steps, one row per step; kept from one split to the next.
        settings: of the smoothing.

    Example:
        >>> times = StepTimes()
        >>> for seconds in (0.9, 1.1, 0.9, 1.1):
        ...     times = times.observe([seconds, 2.0])
        >>> times.best.tolist(), bool(times.errors[0] > 0.1), float(times.errors[1])
        ([1.0, 2.0], True, 0.0)
    """

    smoothed: tuple[float, ...] = ()
    weights: float = 1.0
    mean: tuple[float, ...] = ()
    steps: int = 0
    count: int = 0
    newest: tuple[float, ...] = ()
    differences: tuple[tuple[float, ...], ...] = ()
    settings: SmoothingSettings = SmoothingSettings()

    def observe(self, compute_times: Sequence[float] | Array, *, decay: float = 0.9) -> "StepTimes":
        """Return the times with one more step.

        The first ``1 / (1 - decay)`` steps since the last change have equal weights, so no single one dominates.

        Args:
            compute_times: ``a_i + P_i`` of each worker in seconds.
            decay: weight of the past in the moving average, 0 to 1.
        """
        times = np.asarray(compute_times, dtype=float)
        plain = tuple(times.tolist())
        if not self.smoothed:
            return StepTimes(plain, 1.0, plain, 1, 1, plain, self.differences, self.settings)
        longest = self.settings.longest_mean_steps
        share, part = max(1.0 - decay, 1.0 / (self.count + 1)), max(1.0 / (self.steps + 1), 1.0 / longest)
        logs = np.abs(np.log(np.maximum(times, 1e-9)) - np.log(np.maximum(self.newest, 1e-9)))
        return StepTimes(
            _mixed(self.smoothed, times, share),
            (1.0 - share) ** 2 * self.weights + share**2,
            _mixed(self.mean, times, part),
            min(self.steps + 1, longest),
            self.count + 1,
            plain,
            (*self.differences, tuple(logs.tolist()))[-self.settings.noise_steps :],
            self.settings,
        )

    @property
    def noise(self) -> Array:
        """Standard deviation of single steps, as a share of each worker's time; 0 before there are two steps.

        Estimated from differences of successive steps, which a change of speed affects only once; raised where there
        are few differences.
        """
        if not self.differences:
            return np.zeros(len(self.smoothed))
        rows = np.asarray(self.differences)
        usual = np.minimum(rows, self.settings.outlier_ratio * np.median(rows, axis=0)).mean(axis=0)
        return np.asarray(usual / MEAN_DIFFERENCE * (1.0 + 2.0 / len(rows)))

    @property
    def best(self) -> Array:
        """Best estimate of each worker's seconds for a step."""
        return np.asarray(self.mean)

    @property
    def errors(self) -> Array:
        """Standard error of :attr:`best`, as a share of it."""
        return np.asarray(self.noise / np.sqrt(max(self.steps, 1)))

    def restarted(self) -> "StepTimes":
        """Return empty times for another split, which keep the noise estimate of this one."""
        return StepTimes(differences=self.differences, settings=self.settings)

    def current(self) -> "StepTimes":
        """Return the times at present speeds: drop the mean if any worker's moving average has left it.

        The moving average has left the mean if they differ by more than noise explains; it then replaces the mean.
        """
        apart = self.weights - 1.0 / max(self.steps, 1)  # the mean contains the steps of the moving average
        if not self.smoothed or apart <= 1e-9:
            return self
        left = np.abs(np.log(np.maximum(self.smoothed, 1e-9)) - np.log(np.maximum(self.mean, 1e-9)))
        if not np.any(left > self.settings.leaving_errors * self.noise * np.sqrt(apart) + 1e-9):
            return self
        return replace(self, mean=self.smoothed, steps=max(round(1.0 / self.weights), 1))


def _mixed(old: Sequence[float], new: Array, share: float) -> tuple[float, ...]:
    return tuple(((1.0 - share) * np.asarray(old) + share * new).tolist())
