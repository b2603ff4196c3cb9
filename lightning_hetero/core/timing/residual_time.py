"""Estimate what steps take longer than predicted: a share of the step and seconds, with what is not certain of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Residual"]

Array = npt.NDArray[np.float64]

# None of these is a setting of decisions: what all splits take longer by makes none of them the better one. They say
# how soon predictions follow, and how sure they are.
PRIOR = 0.03
"""Standard deviation of both parts before anything was seen, as a share of the step."""
ROUND = 0.01
"""Relative standard deviation of one round, beside what the scatter of its steps says."""
LEAST = 0.7
"""Share of the predicted time below which what was measured was no step: the slowest worker alone takes longer."""
WALK = 0.003
"""Standard deviation of the walk of both parts between two rounds, as a share of the step."""


@dataclass(frozen=True)
class Residual:
    """``measured = (1 + share) predicted + seconds``: a Kalman filter with two states.

    Steps of one length cannot tell a share from seconds: then each is taken for half of it, and the error grows with
    the distance to that length.

    Args:
        share: part that grows with the step.
        seconds: part that does not: the loop's own time.
        covariance: of both, three numbers: of the share, of both together, of the seconds; empty at first.

    Example:
        >>> residual = Residual()
        >>> for predicted in (1.0, 2.0) * 20:
        ...     residual = residual.observe(predicted, 1.02 * predicted + 0.03, 1e-6)
        >>> round(residual.share, 3), round(residual.seconds, 3), round(residual.error(1.5) / 1.5, 3) < 0.01
        (0.02, 0.03, True)
    """

    share: float = 0.0
    seconds: float = 0.0
    covariance: tuple[float, ...] = ()

    def observe(self, predicted: float, measured: float, variance: float) -> "Residual":
        """The residual after one more round.

        Args:
            predicted: seconds of a step.
            measured: seconds that its steps took.
            variance: of the measurement, relative to its square.
        """
        if measured < LEAST * predicted:
            return self
        scale = max(predicted, 1e-9)
        if self.covariance:
            a, b, c = self.covariance
            before = np.array([[a, b], [b, c]]) + np.diag([WALK**2, (WALK * scale) ** 2])
        else:
            before = np.diag([PRIOR**2, (PRIOR * scale) ** 2])
        row = np.array([predicted, 1.0])
        noise = (variance + ROUND**2) * max(measured, 1e-9) ** 2
        off = measured - predicted - float(row @ [self.share, self.seconds])
        gain = before @ row / float(row @ before @ row + noise)
        share, seconds = np.array([self.share, self.seconds]) + gain * off
        left = np.eye(2) - np.outer(gain, row)
        after = left @ before @ left.T + noise * np.outer(gain, gain)
        return Residual(float(share), float(seconds), (float(after[0, 0]), float(after[0, 1]), float(after[1, 1])))

    def error(self, predicted: float) -> float:
        """Standard error in seconds of what it adds to a predicted step."""
        if not self.covariance:
            return PRIOR * predicted
        a, b, c = self.covariance
        return float(np.sqrt(max(a * predicted**2 + 2.0 * b * predicted + c, 0.0)))

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint."""
        return {"share": self.share, "seconds": self.seconds, "covariance": list(self.covariance)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Residual":
        """What :meth:`state_dict` described."""
        return cls(float(state["share"]), float(state["seconds"]), tuple(map(float, state["covariance"])))
