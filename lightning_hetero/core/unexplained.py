"""What steps take longer than the time model says: the loop's own time, and the slowest worker of each single step.

Times of several workers scatter, and a step waits for the slowest, which takes more than each of them on average. That
grows with the step; what the loop takes by itself does not.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["Unexplained"]

KEPT = 24
FADE = 0.9
"""Weight of a window against the next one; where all are of one length, 0.7 that the newest tell what is so now."""
APART = 0.3
"""Least spread of predictions, as a share of their mean, that tells a share of a step from a constant."""


@dataclass(frozen=True)
class Unexplained:
    """A share of a step and seconds that come on top of its prediction, ``(1 + share) T + seconds``, both ``>= 0``.

    Args:
        windows: predicted and unexplained seconds of a step, the mean of each window, at most 24, newest last.

    Example:
        >>> few = Unexplained().observe(0.1, 0.112)
        >>> few.line  # one length of step: all of it is taken for a constant
        (0.0, 0.012)
        >>> share, seconds = few.observe(0.2, 0.222).line
        >>> round(share, 6), round(seconds, 6)
        (0.1, 0.002)
    """

    windows: tuple[tuple[float, float], ...] = ()

    def observe(self, predicted: float, measured: float) -> "Unexplained":
        """With one more window.

        Args:
            predicted: seconds of a step by the time model alone.
            measured: seconds that its steps took.
        """
        return Unexplained((*self.windows, (float(predicted), round(float(measured - predicted), 12)))[-KEPT:])

    @property
    def line(self) -> tuple[float, float]:
        """``(share, seconds)`` by weighted least squares, new windows before old ones."""
        if not self.windows:
            return 0.0, 0.0
        x, y = np.array(self.windows).T
        age = np.arange(len(x))[::-1]
        if np.ptp(x) < APART * x.mean():
            weight = 0.7**age
            return 0.0, max(0.0, float((weight * y).sum() / weight.sum()))
        weight = FADE**age / (FADE**age).sum()
        x_mean, y_mean = float((weight * x).sum()), float((weight * y).sum())
        share = float((weight * (x - x_mean) * (y - y_mean)).sum() / (weight * (x - x_mean) ** 2).sum())
        seconds = y_mean - share * x_mean
        if share < 0.0:
            return 0.0, max(0.0, y_mean)
        if seconds < 0.0:
            return max(0.0, float((weight * x * y).sum() / (weight * x * x).sum())), 0.0
        return share, seconds
