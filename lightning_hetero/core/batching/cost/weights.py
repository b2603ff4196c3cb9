"""Weights by which a plan divides the cost of a global batch."""

from dataclasses import dataclass
from typing import Any

from lightning_hetero.core.timing.cost.features import FEATURES
from lightning_hetero.core.validation import check_number

__all__ = ["CostWeights"]


@dataclass(frozen=True)
class CostWeights:
    """Cost of a share as a weighted sum of its features, and each worker's fixed time in the same unit.

    The unit is the work of an average sample, so that a plan's sizes are the planned work of each worker. The time of
    worker ``i`` for a share of cost ``c``, relative to its time for its planned work ``b_i``, is
    ``(h_i + c) / (h_i + b_i)``.

    Args:
        theta: weight of each of :data:`~lightning_hetero.core.timing.cost.features.FEATURES`, ``>= 0``, not all 0.
        fixed: ``h_i``, what a step takes worker ``i`` whatever its share, in average samples, ``>= 0``; empty for 0.

    Raises:
        TypeError: if a weight is not a number.
        ValueError: if a weight is negative or infinite, or all weights are 0.

    Example:
        >>> CostWeights.of("padded_cost").theta
        (0.0, 0.0, 1.0, 0.0, 0.0)
    """

    theta: tuple[float, ...]
    fixed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("theta", "fixed"):
            values = tuple(getattr(self, name))
            for value in values:
                check_number(name, value, low=0.0)
            object.__setattr__(self, name, tuple(map(float, values)))
        if len(self.theta) != len(FEATURES) or not any(self.theta):
            raise ValueError(
                f"theta={self.theta} must have one weight for each of {', '.join(FEATURES)}, not all of them 0."
            )

    @classmethod
    def of(cls, feature: str) -> "CostWeights":
        """Return the weights with which the cost of a share is one of its features."""
        return cls(tuple(float(name == feature) for name in FEATURES))

    @property
    def pads(self) -> bool:
        """``True`` if the longest sample of a share matters, so that sorting by cost before cutting pays."""
        return self.theta[2] > 0 or self.theta[4] > 0

    def describe(self) -> str:
        """Describe the cost in words for the log.

        Example:
            >>> CostWeights((0.25, 0.0, 0.75, 0.0, 0.0)).describe()
            '0.25 samples + 0.75 padded_cost'
        """
        return " + ".join(f"{w:.3g} {name}" for w, name in zip(self.theta, FEATURES, strict=True) if w > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {"theta": list(self.theta), "fixed": list(self.fixed)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "CostWeights":
        """Return the weights that :meth:`state_dict` described."""
        return cls(tuple(state["theta"]), tuple(state["fixed"]))
