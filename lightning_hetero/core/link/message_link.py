"""Describe the link that compressed gradients cross: their bytes, their seconds, the rates of all workers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.observations import StepObservations

__all__ = ["LinkProbe", "MessageLink", "without_messages"]


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
