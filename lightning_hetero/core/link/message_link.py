"""Link that compressed gradients cross: the bytes and seconds of messages, and the rates of all workers."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.observations import StepObservations

__all__ = ["MessageLink", "without_messages"]

Densities = TypeVar("Densities", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class MessageLink:
    """The link that compressed gradients cross, as a planner sees it.

    Args:
        density: share of the blocks that is sent at present, above 0, to 1.
        message_size: bytes that a worker sends in a step, by density.
        estimates: estimate of each worker's sending rate; the slowest counts, because all wait for its message.
        seconds: seconds that the messages of the newest steps took, ``None`` if there were none.
        stale: whether messages travel while the next step computes; if not, every step waits for its own.
        latency: seconds that an empty message would take, ``>= 0``.
        latency_error: standard error of the latency in seconds.
        may_be_stale: whether messages may travel while the next step computes.
        step: number of steps that sent messages so far.

    Example:
        >>> size = MessageSize(1_000_000, 2, parts=(32,), listed=80, marked=125_000)
        >>> link = MessageLink(0.01, size, (LinkEstimate(1e6), LinkEstimate(1e5)))
        >>> link.slowest, round(link.transfer(0.01), 3)
        (1, 1.89)
    """

    density: float
    message_size: MessageSize
    estimates: tuple[LinkEstimate, ...]
    seconds: float | None = None
    stale: bool = False
    latency: float = 0.0
    latency_error: float = 0.0
    may_be_stale: bool = False
    step: int = 0

    @property
    def rates(self) -> tuple[float, ...]:
        """Estimated bytes per second that each worker sends; empty before all were measured."""
        known = tuple([estimate.rate for estimate in self.estimates if estimate.rate is not None])
        return known if len(known) == len(self.estimates) else ()

    @property
    def slowest(self) -> int:
        """The worker with the least rate."""
        rates = self.rates
        return rates.index(min(rates))

    @property
    def bytes_now(self) -> float:
        """Bytes that a worker sends in a step at present."""
        return self.message_size.bytes(self.density)

    def at_best(self) -> "MessageLink":
        """Return the link at its fastest plausible rate: with the latency longer by its standard error."""
        if self.seconds is None:
            return self
        latency = min(self.latency + self.latency_error, 0.98 * self.seconds)
        rate = self.bytes_now / (self.seconds - latency)
        return replace(self, latency=latency, latency_error=0.0, estimates=(LinkEstimate(rate),))

    def transfer(self, density: Densities) -> Densities:
        """Return the seconds that plans count on for the messages of a step at each density."""
        return self.latency + self.estimates[self.slowest].seconds(self.message_size.bytes(density))


def without_messages(observations: StepObservations, link: MessageLink | None) -> StepObservations:
    """Return the steps as if they had sent nothing: synchronization and step time shorter by the messages' time.

    If messages are stale, synchronization and step time say nothing about computing: they become 0 and NaN.

    Example:
        >>> zeros = np.zeros((1, 2))
        >>> seen = StepObservations(zeros, zeros, zeros, zeros, zeros, zeros + 0.5, zeros + 2.0)
        >>> bare = without_messages(seen, MessageLink(0.1, MessageSize(9, 2, (32,), 80, 80), (), seconds=0.375))
        >>> bare.last_sync.tolist(), bare.step_time.tolist()
        ([[0.125, 0.125]], [[1.625, 1.625]])
    """
    if link is None:
        return observations
    if link.stale:
        nothing = np.zeros_like(observations.last_sync)
        return replace(observations, last_sync=nothing, step_time=nothing * np.nan)
    seconds = link.seconds or 0.0
    return replace(
        observations,
        last_sync=np.maximum(observations.last_sync - seconds, 0.0),
        step_time=np.maximum(observations.step_time - seconds, 1e-9),
    )
