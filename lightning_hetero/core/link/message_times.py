"""Latency and rates of a link, separated by messages of different sizes.

A message takes ``latency + bytes / rate``. The latency measured before training is that of tiny messages between idle
ranks. During training it is longer; if the excess counted as sending, small messages would make any link look slow. Two
successive sizes determine both numbers, and the first messages follow a large one that was measured before training.

A rate that falls is followed at once, one that rises by a twentieth of the way in each round: too long a message costs
as much time as the link likes, too short a one some percent. Seconds per byte are averaged: one fast moment must not
hide a slow link.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["NEWEST", "MessageTimes"]

Array = npt.NDArray[np.float64]

NEWEST = 3
"""Messages of a round that count, by their median: nine short ones before would hide that the link has become slow,
and a single long one is a stall that is over."""
FASTER = 0.05
"""Weight of the newest messages in a rate that rises."""
FIRST_ERROR = 0.25
"""Standard error of the latency measured before training, as a share of the first messages' time."""
ERROR = 0.05
"""Standard error of the measured time of messages, as a share of it."""
DRIFT = 0.1
"""Least standard error of the latency when the size changes, as a share of the messages' time."""


@dataclass(frozen=True)
class MessageTimes:
    """Estimates of latency and rates from the messages so far.

    Args:
        rates: bytes per second that each worker sends; empty before they were measured.
        latency: seconds that an empty message would take, ``>= 0``; at first the value measured before training.
        latency_error: standard error of the latency in seconds, ``None`` before the first messages.
        last: bytes and seconds of the newest messages, or of one before training; ``None`` before there are any.
        least: fewest seconds of any messages so far, which the latency cannot exceed: a link that has become slow since
            the last size would otherwise look like one of a long latency.

    Example:
        >>> times = MessageTimes(latency=0.001)
        >>> for num_bytes, seconds in ((1e6, 1.003), (1e5, 0.103), (1e4, 0.013)):
        ...     times = times.observe(num_bytes, np.array([seconds, seconds]))
        >>> round(times.latency, 4), round(times.rates[0] / 1e6, 2)
        (0.003, 1.0)
    """

    rates: tuple[float, ...] = ()
    latency: float = 0.0
    latency_error: float | None = None
    last: tuple[float, float] | None = None
    least: float = math.inf

    def begun(self, num_bytes: float, seconds: float, size: int) -> "MessageTimes":
        """Return the estimates after a large message that was measured before training, on the slowest of ``size``."""
        rate = num_bytes / max(seconds - self.latency, 0.1 * seconds, 1e-9)
        return replace(self, rates=(rate,) * size, last=(num_bytes, seconds), least=seconds)

    def observe(self, num_bytes: float, seconds: Array) -> "MessageTimes":
        """Return the estimates after the newest messages.

        Args:
            num_bytes: bytes that a worker sent to all others in a step.
            seconds: seconds that each worker's message took; at least a tenth of them counts as sending.
        """
        slowest = float(seconds.max())
        latency, error = self._latency(num_bytes, slowest)
        least = min(self.least, slowest)
        latency = min(latency, least)
        per_byte = np.maximum(np.maximum(seconds - latency, 0.1 * seconds), 1e-9) / num_bytes
        if self.rates:
            per_byte = np.maximum(per_byte, FASTER * per_byte + (1.0 - FASTER) / np.array(self.rates))
        rates, last = tuple((1.0 / per_byte).tolist()), (num_bytes, slowest)
        return replace(self, rates=rates, latency=latency, latency_error=error, last=last, least=least)

    def _latency(self, num_bytes: float, seconds: float) -> tuple[float, float]:
        """Return latency and its standard error, by one step of a Kalman filter if the size has changed."""
        latency, error = self.latency, self.latency_error
        variance = (FIRST_ERROR * seconds if error is None else error) ** 2
        if self.last is not None and self.last[0] != num_bytes:
            size, took = self.last
            variance = max(variance, (DRIFT * seconds) ** 2)
            seen = max((seconds * size - took * num_bytes) / (size - num_bytes), 0.0)  # intercept of the line
            noise = ERROR**2 * ((seconds * size) ** 2 + (took * num_bytes) ** 2) / (size - num_bytes) ** 2
            latency += variance / (variance + noise) * (seen - latency)
            variance *= noise / (variance + noise)
        return latency, variance**0.5
