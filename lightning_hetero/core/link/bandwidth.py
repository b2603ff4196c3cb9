"""Rates of a link: the estimate for stale buckets, and the paper's rule by idle time (S sec. 4.1)."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_number

__all__ = ["LinkEstimate", "idle_rate", "sum_bytes"]

Bytes = TypeVar("Bytes", float, npt.NDArray[np.float64])

WEIGHT_OF_SLOWER, WEIGHT_OF_FASTER = 0.8, 0.5
"""Weights of an observation below and above the estimate."""
PLANNED_SHARE = 0.9
"""Share of the estimate that plans count on."""
IDLE_SHARE, IDLE_UP, IDLE_DOWN = 0.05, 1.05, 0.8
"""Share of a step for which workers may idle before the paper's rule lowers the rate, and the factors of that rule."""


@dataclass(frozen=True)
class LinkEstimate:
    """Bytes per second that a worker can send: down at once, up slowly.

    Overestimating a link makes every step wait; underestimating it costs a little staleness. So the estimate follows a
    slower observation almost at once and a faster one gradually. Seconds per byte are averaged, not bytes per second:
    one fast moment must not hide a slow link.

    Args:
        rate: smoothed rate, bytes per second, above 0; ``None`` before the first observation.

    Raises:
        TypeError: if the rate is not a number.
        ValueError: if it is not above 0.

    Example:
        >>> down, up = LinkEstimate(100.0).observe(10.0), LinkEstimate(10.0).observe(100.0)
        >>> round(down.rate, 1), round(up.rate, 1)
        (12.2, 18.2)
    """

    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_number("rate", self.rate, low=0.0, include_low=False)

    def observe(self, rate: float) -> "LinkEstimate":
        """Return the estimate after an observation in bytes per second; one not finite or not above 0 is ignored."""
        if not 0.0 < rate < float("inf"):
            return self
        if self.rate is None:
            return replace(self, rate=rate)
        weight = WEIGHT_OF_SLOWER if rate < self.rate else WEIGHT_OF_FASTER
        return replace(self, rate=1.0 / ((1.0 - weight) / self.rate + weight / rate))

    def seconds(self, num_bytes: Bytes) -> Bytes:
        """Return the seconds that plans count on for sending these bytes; 0 before the first observation.

        Example:
            >>> LinkEstimate(rate=1000.0).seconds(90.0)
            0.1
        """
        return 0.0 * num_bytes if self.rate is None else num_bytes / (PLANNED_SHARE * self.rate)


def idle_rate(rate: float, share: float) -> float:
    """Return a rate after the paper's rule: up while workers idle for less than 5 % of a step, else down.

    Args:
        rate: bytes per second so far.
        share: share of a step for which workers wait for the link longer than that rate predicts.

    Example:
        >>> idle_rate(100.0, 0.01), idle_rate(100.0, 0.3)
        (105.0, 80.0)
    """
    return rate * (IDLE_UP if share < IDLE_SHARE else IDLE_DOWN)


def sum_bytes(num_bytes: float, world_size: int) -> float:
    """Return the bytes that each worker sends to all-reduce a buffer: ``2 (N - 1) / N`` times its size (ring).

    Example:
        >>> sum_bytes(100.0, 2), sum_bytes(100.0, 4)
        (100.0, 150.0)
    """
    return 2.0 * (world_size - 1) / world_size * num_bytes
