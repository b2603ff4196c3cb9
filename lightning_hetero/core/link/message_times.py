"""Latency and rates of a link, separated by messages of different sizes (S sec. 4.1).

A message takes ``latency + bytes / rate``. The latency measured before training is that of tiny messages between idle
ranks. During training it is longer; if the excess counted as sending, small messages would make any link look slow. Two
successive sizes determine both numbers; until then they stay uncertain.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.link.bandwidth import LinkEstimate, sending_rate
from lightning_hetero.core.validation import check_number

__all__ = ["LatencySettings", "MessageTimes"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LatencySettings:
    """Settings of the estimate of latency from the times of messages.

    Args:
        busy_factor: ratio of the latency during training to the one measured before it, 1 or more; used until messages
            of two sizes were seen.
        first_relative_error: standard error of that latency, as a share of the first messages' time, above 0.
        relative_error: standard error of the measured time of messages, as a share of it, above 0.
        relative_drift: least standard error of the latency when the size changes, as a share of the messages' time.

    Example:
        >>> LatencySettings().busy_factor
        2.0
    """

    busy_factor: float = 2.0
    first_relative_error: float = 0.25
    relative_error: float = 0.05
    relative_drift: float = 0.1

    def __post_init__(self) -> None:
        check_number("busy_factor", self.busy_factor, low=1.0)
        check_number("first_relative_error", self.first_relative_error, low=0.0, include_low=False)
        check_number("relative_error", self.relative_error, low=0.0, include_low=False)
        check_number("relative_drift", self.relative_drift, low=0.0)


SETTINGS = LatencySettings()


@dataclass(frozen=True)
class MessageTimes:
    """Estimates of latency and rates from the messages so far.

    Args:
        links: estimate of each worker's rate.
        latency: seconds that an empty message would take, ``>= 0``; at first the value measured before training.
        latency_error: standard error of the latency in seconds, ``None`` before the first messages.
        last: bytes and seconds of the newest messages, ``None`` before there are any.
        settings: of the estimate of latency.

    Example:
        >>> times = MessageTimes((LinkEstimate(),) * 2, latency=0.001)
        >>> for num_bytes, seconds in ((1e6, 1.003), (1e5, 0.103), (1e4, 0.013)):
        ...     times = times.observe(num_bytes, np.array([seconds, seconds]))
        >>> round(times.latency, 4)
        0.003
    """

    links: tuple[LinkEstimate, ...]
    latency: float = 0.0
    latency_error: float | None = None
    last: tuple[float, float] | None = None
    settings: LatencySettings = SETTINGS

    def observe(self, num_bytes: float, seconds: Array) -> "MessageTimes":
        """Return the estimates after the newest messages.

        Args:
            num_bytes: bytes that a worker sent to all others in a step.
            seconds: seconds that each worker's message took.
        """
        slowest = float(seconds.max())
        latency, error = self._latency(num_bytes, slowest)
        rates = (sending_rate(num_bytes, took, latency) for took in seconds.tolist())
        links = tuple(link.observe(rate) for link, rate in zip(self.links, rates, strict=True))
        return replace(self, links=links, latency=latency, latency_error=error, last=(num_bytes, slowest))

    def _latency(self, num_bytes: float, seconds: float) -> tuple[float, float]:
        """Return latency and its standard error, by one step of a Kalman filter if the size has changed."""
        s = self.settings
        if self.latency_error is None or self.last is None:
            return min(s.busy_factor * self.latency, seconds), s.first_relative_error * seconds
        latency, variance, (size, took) = self.latency, self.latency_error**2, self.last
        if size != num_bytes:
            variance = max(variance, (s.relative_drift * seconds) ** 2)
            seen = max((seconds * size - took * num_bytes) / (size - num_bytes), 0.0)  # intercept of the line
            noise = s.relative_error**2 * ((seconds * size) ** 2 + (took * num_bytes) ** 2) / (size - num_bytes) ** 2
            latency += variance / (variance + noise) * (seen - latency)
            variance *= noise / (variance + noise)
        return min(latency, seconds), variance**0.5
