"""How fast a link is, as a conservative estimate: down at once, up slowly (StellaTrain, sec. 4.1 and 7).

A link that is believed too fast makes every step wait; one that is believed too slow costs a little staleness. So a
slower observation is believed almost at once and a faster one bit by bit. Seconds per byte are averaged, not bytes per
second, so that one fast moment does not hide a slow link.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.validation import check_number

__all__ = ["LinkEstimate", "LinkProbe", "MessageLink", "sending_rate", "sum_bytes", "without_messages"]

DOWN = 0.8
"""Weight of an observation below the estimate."""

UP = 0.5
"""Weight of an observation above it."""

MARGIN = 0.9
"""Share of the estimate that plans count on."""

IDLE = 0.05
"""Share of a step that workers may idle before the rate is believed to be lower (StellaTrain, sec. 4.1)."""

IDLE_UP, IDLE_DOWN = 1.05, 0.8
"""Factors by which that rule moves the rate."""


@dataclass(frozen=True)
class LinkEstimate:
    """Bytes per second that a worker can send, from transfers of gradients.

    Args:
        rate: smoothed rate, bytes per second, above 0; ``None`` before the first observation.

    Raises:
        TypeError: if the rate is no number.
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
        """The estimate after an observation in bytes per second; one that is not finite or not above 0 says nothing."""
        if not 0.0 < rate < float("inf"):
            return self
        if self.rate is None:
            return replace(self, rate=rate)
        weight = DOWN if rate < self.rate else UP
        return replace(self, rate=1.0 / ((1.0 - weight) / self.rate + weight / rate))

    def observe_idle(self, share: float) -> "LinkEstimate":
        """The estimate by the paper's rule: up while workers idle for less than 5 % of a step, else down (sec. 4.1).

        Args:
            share: of a step in which workers wait for the link although, at the rate that is believed, they would not
                have to; one that is not finite says nothing.

        Example:
            >>> LinkEstimate(100.0).observe_idle(0.01).rate, LinkEstimate(100.0).observe_idle(0.3).rate
            (105.0, 80.0)
        """
        if self.rate is None or not math.isfinite(share):
            return self
        return replace(self, rate=self.rate * (IDLE_UP if share < IDLE else IDLE_DOWN))

    def seconds(self, num_bytes: float) -> float:
        """Seconds to count on for sending so many bytes; 0 before the first observation.

        Example:
            >>> LinkEstimate(rate=1000.0).seconds(90.0)
            0.1
        """
        return 0.0 if self.rate is None else num_bytes / (MARGIN * self.rate)


@dataclass(frozen=True)
class LinkProbe:
    """Times of exchanges that were made to be timed: of next to nothing, of present messages, and of another size.

    All three follow each other, so that what they differ by is the size alone.

    Args:
        latency: seconds of an exchange of next to nothing, ``>= 0``.
        bytes_now: bytes that a worker sends in a step at present.
        now: seconds of an exchange of so many, the shortest of those that were tried.
        num_bytes: bytes of the other size.
        seconds: seconds of an exchange of that size, the longest of those that were tried.
        handling_now: seconds of selecting, writing, reading and merging that grow with messages, at the present size.
        handling: the same at the other size.

    Example:
        >>> LinkProbe(0.001, 1000.0, 0.002, 5000.0, 0.006).slope
        1e-06
    """

    latency: float
    bytes_now: float
    now: float
    num_bytes: float
    seconds: float
    handling_now: float = 0.0
    handling: float = 0.0

    def added(self, num_bytes: float) -> float:
        """Seconds by which a message of this size takes longer than a present one; straight between what was timed.

        Example:
            >>> LinkProbe(0.001, 1000.0, 0.002, 5000.0, 0.006).added(2000.0)
            0.001
        """
        sizes, times = zip(
            *sorted([(0.0, self.latency), (self.bytes_now, self.now), (self.num_bytes, self.seconds)]), strict=True
        )
        return round(float(np.interp(num_bytes, sizes, times)) - self.now, 12)

    @property
    def slope(self) -> float:
        """Seconds on the link for a byte more, between the two sizes; 0 if the larger one took no longer."""
        return max((self.seconds - self.now) / (self.num_bytes - self.bytes_now), 0.0)

    @property
    def handling_slope(self) -> float:
        """Seconds of handling for a byte more, in the same way."""
        return max((self.handling - self.handling_now) / (self.num_bytes - self.bytes_now), 0.0)


@dataclass(frozen=True)
class MessageLink:
    """What compressed gradients cross, as a planner sees it.

    Args:
        density: share of the blocks that is sent at present, above 0, to 1.
        message_bytes: bytes that a worker sends in a step at a density, increasing; in a training, a
            :class:`~lightning_hetero.core.link.message_size.MessageSize`.
        estimates: what is known of each worker's rate of sending; the slowest counts, because all wait for its message.
        seconds: what the messages of the newest steps took, ``None`` if there were none.
        hidden: whether messages travel while the next step computes, or else every step waits for its own.
        latency: seconds of messages of next to nothing, ``>= 0``, which would make a link look slow to small messages.
        may_hide: whether messages may travel while the next step computes.
        step: steps that were exchanged so far.
        probe: newest exchanges that were made to be timed, if they were since ranks last compared.

    Example:
        >>> link = MessageLink(0.01, lambda density: 1e6 * density, (LinkEstimate(1e6), LinkEstimate(1e5)))
        >>> link.slowest, round(link.transfer(0.09), 6)
        (1, 1.0)
    """

    density: float
    message_bytes: Callable[[float], float]
    estimates: tuple[LinkEstimate, ...]
    seconds: float | None = None
    hidden: bool = False
    latency: float = 0.0
    may_hide: bool = False
    step: int = 0
    probe: LinkProbe | None = None

    @property
    def rates(self) -> tuple[float, ...]:
        """Bytes per second that each worker is believed to send; empty before all were seen."""
        known = tuple(estimate.rate for estimate in self.estimates if estimate.rate is not None)
        return known if len(known) == len(self.estimates) else ()

    @property
    def slowest(self) -> int:
        """The worker with the least rate."""
        return self.rates.index(min(self.rates))

    @property
    def bytes_now(self) -> float:
        """Bytes that a worker sends in a step at present."""
        return self.message_bytes(self.density)

    def transfer(self, density: float) -> float:
        """Seconds to count on for the messages of a step at a density."""
        return self.latency + self.estimates[self.slowest].seconds(self.message_bytes(density))


def sending_rate(num_bytes: float, seconds: float, latency: float) -> float:
    """Bytes per second of a message that took ``seconds``; at least a tenth of them count as sending.

    Example:
        >>> sending_rate(100.0, 0.3, latency=0.1), sending_rate(100.0, 0.1, latency=0.1)
        (500.0, 10000.0)
    """
    return round(num_bytes / max(seconds - latency, 0.1 * seconds, 1e-9), 6)


def sum_bytes(num_bytes: float, world_size: int) -> float:
    """Bytes that each worker sends to sum up a buffer over all of them: ``2 (N - 1) / N`` times its size (ring).

    Example:
        >>> sum_bytes(100.0, 2), sum_bytes(100.0, 4)
        (100.0, 150.0)
    """
    return 2.0 * (world_size - 1) / world_size * num_bytes


def without_messages(observations: StepObservations, link: MessageLink | None) -> StepObservations:
    """The same steps as if they had sent nothing: synchronisation and step time shorter by the messages' time.

    Of messages that travel while the next step computes, synchronisation and step time say nothing about computing.

    Example:
        >>> zeros = np.zeros((1, 2))
        >>> seen = StepObservations(zeros, zeros, zeros, zeros, zeros, zeros + 0.5, zeros + 2.0)
        >>> bare = without_messages(seen, MessageLink(0.1, float, (), seconds=0.375))
        >>> bare.last_sync.tolist(), bare.step_time.tolist()
        ([[0.125, 0.125]], [[1.625, 1.625]])
    """
    if link is None:
        return observations
    if link.hidden:
        nothing = np.zeros_like(observations.last_sync)
        return replace(observations, last_sync=nothing, step_time=nothing * np.nan)
    seconds = link.seconds or 0.0
    return replace(
        observations,
        last_sync=np.maximum(observations.last_sync - seconds, 0.0),
        step_time=np.maximum(observations.step_time - seconds, 1e-9),
    )
