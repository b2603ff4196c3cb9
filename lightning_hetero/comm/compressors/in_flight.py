"""What a compressed exchange hands on: messages on their way, who applies them when, and what was sent."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_hetero.compression.reference import Pack

__all__ = ["Late", "Sending", "StepReport"]


@dataclass
class StepReport:
    """Sums over steps of what was sent.

    Args:
        steps: steps.
        sent: bytes that this rank sent to others, those inside its cluster left out.
        received: bytes that it received.
        density: share of the gradient's elements that was applied, summed over steps.
        encode: seconds of error feedback, selection and writing.
    """

    steps: int = 0
    sent: float = 0.0
    received: float = 0.0
    density: float = 0.0
    encode: float = 0.0

    def add(self, sent: float, density: float, encode: float = 0.0) -> None:
        """One more step, in which as much was received as sent."""
        self.steps += 1
        self.sent += sent
        self.received += sent
        self.density += density
        self.encode += encode


@dataclass
class Sending:
    """Messages of one step on their way, this rank's and those of all others.

    Args:
        rows: the messages, one row for each rank, or in a hierarchy for each cluster.
        step: the step that they belong to.
        arrival: is done when they are there.
        finite: whether this rank's gradient was, as far as the host knows.
    """

    rows: torch.Tensor
    step: int
    arrival: Any
    finite: bool


class Late(Protocol):
    """Who decides in which step messages are applied."""

    def turn(self, sending: Sending) -> list[Pack]:
        """What the running step applies, now that its messages are on their way."""

    def pay(self, bucket: dist.GradBucket) -> None:
        """Put what is owed into a bucket that is about to be summed densely."""

    def unpaid(self) -> None:
        """That dense sum was left out."""

    def settle(self) -> None:
        """Wait for what is under way."""
