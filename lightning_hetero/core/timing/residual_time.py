"""Measured minus predicted step time: a share of the step plus constant seconds, with their covariance."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.timing.times import ESTIMATOR_DEFAULTS, EstimatorSettings

__all__ = ["Residual"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Residual:
    """Kalman filter with two states of ``measured = (1 + share) predicted + seconds``.

    Steps of one length cannot tell the share from the seconds: each then gets half of the difference, and the error
    grows with the distance to that length.

    Args:
        share: part that grows with the step.
        seconds: part that does not: the time of the training loop itself.
        covariance: three numbers: variance of the share, covariance, variance of the seconds; empty at first.

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

    def observe(
        self, predicted: float, measured: float, variance: float, settings: EstimatorSettings = ESTIMATOR_DEFAULTS
    ) -> "Residual":
        """Return the residual after one more round.

        Args:
            predicted: predicted seconds of a step.
            measured: mean seconds of the steps of the round.
            variance: variance of ``measured``, relative to its square.
            settings: of the estimator; those of the residual are used.
        """
        if measured < (1.0 - settings.residual_shortfall) * predicted:
            return self
        scale = max(predicted, 1e-9)
        if self.covariance:
            a, b, c = self.covariance
            walk = settings.residual_walk
            before = np.array([[a, b], [b, c]]) + np.diag([walk**2, (walk * scale) ** 2])
        else:
            before = np.diag([settings.residual_prior**2, (settings.residual_prior * scale) ** 2])
        row = np.array([predicted, 1.0])
        noise = (variance + settings.residual_rounds**2) * max(measured, 1e-9) ** 2
        off = measured - predicted - float(row @ [self.share, self.seconds])
        gain = before @ row / float(row @ before @ row + noise)
        share, seconds = np.array([self.share, self.seconds]) + gain * off
        left = np.eye(2) - np.outer(gain, row)
        after = left @ before @ left.T + noise * np.outer(gain, gain)
        return Residual(float(share), float(seconds), (float(after[0, 0]), float(after[0, 1]), float(after[1, 1])))

    def error(self, predicted: float, settings: EstimatorSettings = ESTIMATOR_DEFAULTS) -> float:
        """Return the standard error in seconds of the residual of a predicted step."""
        if not self.covariance:
            return settings.residual_prior * predicted
        a, b, c = self.covariance
        return float(np.sqrt(max(a * predicted**2 + 2.0 * b * predicted + c, 0.0)))

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {"share": self.share, "seconds": self.seconds, "covariance": list(self.covariance)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Residual":
        """Return the residual restored from :meth:`state_dict`."""
        return cls(float(state["share"]), float(state["seconds"]), tuple(map(float, state["covariance"])))
