"""Link that compressed gradients cross: the bytes and seconds of messages, and the rates of all workers."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.observations import StepObservations

__all__ = ["MessageLink", "without_messages"]

COMPUTING = "data_wait", "forward", "optimizer", "backward", "first_bucket"
Densities = TypeVar("Densities", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class MessageLink:
    """The link that compressed gradients cross, as a planner sees it.

    Args:
        density: share of the blocks that is sent at present, above 0, to 1.
        message_size: bytes that a worker sends in a step, by density.
        rates: bytes per second that each worker sends; the least counts, because all wait for that message. Empty
            before they were measured.
        seconds: seconds that the messages of the newest steps took, ``None`` if there were none.
        stale: whether messages travel while the next step computes; if not, every step waits for its own.
        latency: seconds that an empty message would take, ``>= 0``.

    Example:
        >>> size = MessageSize(1_000_000, 2, parts=(32,), listed=80, marked=125_000)
        >>> round(MessageLink(0.01, size, (1e6, 1e5)).transfer(0.01), 3)
        1.701
    """

    density: float
    message_size: MessageSize
    rates: tuple[float, ...]
    seconds: float | None = None
    stale: bool = False
    latency: float = 0.0

    @property
    def bytes_now(self) -> float:
        """Bytes that a worker sends in a step at present."""
        return self.message_size.bytes(self.density)

    def transfer(self, density: Densities) -> Densities:
        """Return the seconds that the messages of a step take at each density."""
        return self.latency + self.message_size.bytes(density) / min(self.rates)


def without_messages(observations: StepObservations, link: MessageLink | None, drag: float = 0.0) -> StepObservations:
    """Return the steps as if they had sent nothing: synchronization and step time shorter by the messages' time.

    If messages are stale, synchronization and step time say nothing about computing: they become 0 and NaN. Computing
    gets shorter by ``drag`` of the time that a message was under way.

    Example:
        >>> zeros = np.zeros((1, 2))
        >>> seen = StepObservations(zeros, zeros, zeros, zeros, zeros, zeros + 0.5, zeros + 2.0)
        >>> bare = without_messages(seen, MessageLink(0.1, MessageSize(9, 2, (32,), 80, 80), (), seconds=0.375))
        >>> bare.last_sync.tolist(), bare.step_time.tolist()
        ([[0.125, 0.125]], [[1.625, 1.625]])
    """
    if link is None:
        return observations
    seconds = link.seconds or 0.0
    if link.stale:
        nothing = np.zeros_like(observations.last_sync)
        alone = 1.0 - drag * np.minimum(seconds / np.maximum(observations.compute, 1e-9), 1.0)
        parts = {name: alone * getattr(observations, name) for name in COMPUTING}
        return replace(observations, last_sync=nothing, step_time=nothing * np.nan, **parts)
    return replace(
        observations,
        last_sync=np.maximum(observations.last_sync - seconds, 0.0),
        step_time=np.maximum(observations.step_time - seconds, 1e-9),
    )
