"""Gradient noise of a simulated training: its true scale along the samples, and the estimate that a run would have."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.validation import check_number

__all__ = ["NoiseTrajectory"]


@checked_keywords
class NoiseTrajectory:
    """Noise scale that grows, or falls, with the samples, seen through the estimator of a run.

    In each step, ``tr(Sigma)`` and ``|g|^2 = |G|^2 + tr(Sigma) / B`` are measured with an error; ``|G|^2`` is 1. The
    means of the steps between two sync rounds, weighted by their samples, go into the running estimate.

    Args:
        scale: noise scale in samples, above 0, by the samples so far.
        errors: relative standard deviations of ``tr(Sigma)`` and of ``|g|^2`` of a single step.
        horizon: steps over which the estimate looks back.

    Raises:
        TypeError: if ``scale`` is no function, or an error no number.
        ValueError: if a number is out of range.

    Example:
        >>> noise = NoiseTrajectory(lambda samples: 100.0 + samples / 10, errors=(0.0, 0.0))
        >>> noise.see(total=50, steps=2, samples=0)
        >>> round(noise.estimate().noise_scale, 3)
        102.5
    """

    def __init__(
        self,
        scale: Callable[[float], float],
        errors: tuple[float, float] = (0.4, 0.1),
        horizon: float = RunningNoiseScale().horizon,
    ) -> None:
        if not callable(scale):
            raise TypeError(f"noise_scale={scale!r} must be a function of the samples so far, such as lambda n: 1e3.")
        self._scale, self._errors = scale, tuple(check_number("errors", error, low=0.0) for error in errors)
        self._rng = np.random.default_rng([0, 3])
        self._running, self._sums = RunningNoiseScale(horizon=horizon), np.zeros(5)

    @classmethod
    def of(cls, given: Any) -> "NoiseTrajectory":
        """Return a trajectory as it is, or make one of a function."""
        return given if isinstance(given, cls) else cls(given)

    def begin(self, seed: int) -> None:
        """Draw the errors by a seed from now on."""
        self._rng = np.random.default_rng([seed, 3])

    def at(self, samples: float) -> float:
        """Return the true noise scale after so many samples."""
        return check_number("noise_scale(...)", self._scale(samples), low=0.0, include_low=False)

    def see(self, total: int, steps: int, samples: float) -> None:
        """Take note of steps of one total that begin after so many samples."""
        trace = np.array([self.at(samples + total * t) for t in range(steps)])
        errors = 1.0 + self._rng.standard_normal((2, steps)) * np.array(self._errors)[:, None]
        norm = (1.0 + trace / total) * errors[1]
        self._sums += [total * (trace * errors[0]).sum(), total * norm.sum(), steps, total * steps, steps]

    def estimate(self) -> RunningNoiseScale:
        """End a sync round: return the running estimate of all steps so far."""
        from lightning_hetero.comm.noise.window_sums import merge_parts  # which loads torch

        self._running, self._sums = merge_parts(self._running, self._sums[None]), np.zeros(5)
        return self._running
