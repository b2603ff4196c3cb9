"""Conservative estimate of a link's rate: down at once, up slowly (S sec. 4.1 and 6).

Overestimating a link makes every step wait; underestimating it costs a little staleness. So the estimate follows a
slower observation almost at once and a faster one gradually. Seconds per byte are averaged, not bytes per second: one
fast moment must not hide a slow link.
"""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_number

__all__ = ["BandwidthSettings", "LinkEstimate", "sending_rate", "sum_bytes"]

Bytes = TypeVar("Bytes", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class BandwidthSettings:
    """Settings of the estimate of a rate.

    Args:
        weight_of_slower: weight of an observation below the estimate, 0 to 1.
        weight_of_faster: weight of an observation above it, 0 to 1.
        planned_share: share of the estimate that plans count on, above 0, to 1.
        idle_share: share of a step for which workers may idle before the rule of S sec. 4.1 lowers the rate, 0 to 1.
        idle_factor_up: factor by which that rule raises the rate, 1 or more.
        idle_factor_down: factor by which it lowers the rate, above 0, to 1.

    Example:
        >>> BandwidthSettings().planned_share
        0.9
    """

    weight_of_slower: float = 0.8
    weight_of_faster: float = 0.5
    planned_share: float = 0.9
    idle_share: float = 0.05
    idle_factor_up: float = 1.05
    idle_factor_down: float = 0.8

    def __post_init__(self) -> None:
        for name in ("weight_of_slower", "weight_of_faster", "idle_share"):
            check_number(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("planned_share", "idle_factor_down"):
            check_number(name, getattr(self, name), low=0.0, high=1.0, include_low=False)
        check_number("idle_factor_up", self.idle_factor_up, low=1.0)


SETTINGS = BandwidthSettings()


@dataclass(frozen=True)
class LinkEstimate:
    """Bytes per second that a worker can send, estimated from transfers of gradients.

    Args:
        rate: smoothed rate, bytes per second, above 0; ``None`` before the first observation.
        settings: of the estimate.

    Raises:
        TypeError: if the rate is not a number.
        ValueError: if it is not above 0.

    Example:
        >>> down, up = LinkEstimate(100.0).observe(10.0), LinkEstimate(10.0).observe(100.0)
        >>> round(down.rate, 1), round(up.rate, 1)
        (12.2, 18.2)
    """

    rate: float | None = None
    settings: BandwidthSettings = SETTINGS

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_number("rate", self.rate, low=0.0, include_low=False)

    def observe(self, rate: float) -> "LinkEstimate":
        """Return the estimate after an observation in bytes per second; one not finite or not above 0 is ignored."""
        if not 0.0 < rate < float("inf"):
            return self
        if self.rate is None:
            return replace(self, rate=rate)
        s = self.settings
        weight = s.weight_of_slower if rate < self.rate else s.weight_of_faster
        return replace(self, rate=1.0 / ((1.0 - weight) / self.rate + weight / rate))

    def observe_idle(self, share: float) -> "LinkEstimate":
        """Return the estimate by the paper's rule: up while workers idle for less than 5 % of a step, else down.

        Args:
            share: share of a step for which workers wait for the link longer than the estimated rate predicts; ignored
                if not finite.

        Example:
            >>> LinkEstimate(100.0).observe_idle(0.01).rate, LinkEstimate(100.0).observe_idle(0.3).rate
            (105.0, 80.0)
        """
        if self.rate is None or not math.isfinite(share):
            return self
        s = self.settings
        return replace(self, rate=self.rate * (s.idle_factor_up if share < s.idle_share else s.idle_factor_down))

    def seconds(self, num_bytes: Bytes) -> Bytes:
        """Return the seconds that plans count on for sending these bytes; 0 before the first observation.

        Example:
            >>> LinkEstimate(rate=1000.0).seconds(90.0)
            0.1
        """
        return 0.0 * num_bytes if self.rate is None else num_bytes / (self.settings.planned_share * self.rate)


def sending_rate(num_bytes: float, seconds: float, latency: float) -> float:
    """Return the bytes per second of a message, without latency; at least a tenth of ``seconds`` counts as sending.

    Example:
        >>> sending_rate(100.0, 0.3, latency=0.1), sending_rate(100.0, 0.1, latency=0.1)
        (500.0, 10000.0)
    """
    return round(num_bytes / max(seconds - latency, 0.1 * seconds, 1e-9), 6)


def sum_bytes(num_bytes: float, world_size: int) -> float:
    """Return the bytes that each worker sends to all-reduce a buffer: ``2 (N - 1) / N`` times its size (ring).

    Example:
        >>> sum_bytes(100.0, 2), sum_bytes(100.0, 4)
        (100.0, 150.0)
    """
    return 2.0 * (world_size - 1) / world_size * num_bytes
