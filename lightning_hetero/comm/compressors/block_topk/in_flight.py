"""Buckets of a backward pass that wait for the merged message, and messages in flight."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.compression.layout import Slot
from lightning_hetero.compression.reference import Pack

__all__ = ["BackwardPass", "InFlight", "Span", "StaleMessages"]

Span = tuple[Any, Any]
"""Two marks of a clock."""


@dataclass
class InFlight:
    """Messages of one step that were sent and are not applied yet, this rank's and those of all others.

    Args:
        rows: the messages, one row for each rank, or in a hierarchy for each cluster.
        step: the step that they belong to.
        arrival: future that is done when they have arrived.
        finite: whether this rank's gradient was finite, as far as the host knows.
    """

    rows: torch.Tensor
    step: int
    arrival: Any
    finite: bool

    def mark_not_finite(self) -> None:
        """Note that this rank's gradient was not finite."""
        self.finite = False


class StaleMessages(Protocol):
    """Decision in which step messages are applied."""

    @property
    def topology(self) -> Topology | None:
        """Topology of messages, with process groups of its own; ``None`` for the averager's."""

    def step(self, sent: InFlight) -> list[Pack]:
        """Return what the running step applies, now that its messages are in flight."""

    def add_to_dense(self, bucket: dist.GradBucket) -> None:
        """Add sums that were not applied yet to a bucket that is about to be summed densely."""

    def undo_add(self) -> None:
        """Undo :meth:`add_to_dense`, because the dense sum was left out."""

    def wait(self) -> None:
        """Wait for the messages in flight."""


@dataclass
class BackwardPass:
    """Buckets of one backward pass that wait for the message, and their outcome.

    Args:
        weight: factor on this rank's gradient when it is added to the residual.
        scale: factor of a loss scaler on the gradient.
        waiting: buffers of buckets, their slots, and the futures that DDP waits for.
        raised: buckets that are being reduced inside a cluster.
        finite: whether this rank's gradient is finite, as far as the host knows.
        spans: marks around error feedback, selection and writing.
        arrived: ``"dense"`` or ``"compressed"`` once the last bucket was averaged.
        gradients: blocks for an optimizer that takes them.
    """

    weight: float = 1.0
    scale: float = 1.0
    waiting: list[tuple[torch.Tensor, list[Slot], Any]] = field(default_factory=list)
    raised: list[tuple[Any, torch.Tensor, list[Slot]]] = field(default_factory=list)
    finite: bool = True
    spans: list[Span] = field(default_factory=list)
    arrived: str | None = None
    gradients: Mapping[torch.Tensor, BlockGradient | BlockMarks] | None = None

    def add(self, buffer: torch.Tensor, slots: list[Slot], future: Any, reduced: Any) -> None:
        """Add a bucket."""
        self.waiting.append((buffer, slots, future))
        self.raised.append((reduced, buffer, slots))

    def pop_reduced(self, *, everything: bool) -> tuple[torch.Tensor, list[Slot]] | None:
        """Return the next bucket reduced inside the cluster, ``None`` without one; with ``everything``, wait for it."""
        if not self.raised:
            return None
        reduced, buffer, slots = self.raised[0]
        if not (everything or reduced is None or reduced.is_completed()):
            return None
        self.raised.pop(0)
        if reduced is not None:
            reduced.wait()
        return buffer, slots

    def accumulated(self, finite: bool, span: Span) -> None:
        """Note that a bucket went into the residual, or was not finite."""
        self.finite = self.finite and finite
        self.spans.append(span)

    def hand_over(self, gradients: Mapping[torch.Tensor, BlockGradient | BlockMarks] | None) -> None:
        """Keep blocks for the optimizer; ``None`` for none."""
        self.gradients = gradients

    def complete(self, arrived: str) -> None:
        """Complete DDP's futures: its buckets now hold the averaged gradient."""
        self.arrived = arrived
        waiting, self.waiting = self.waiting, []
        for buffer, _, future in waiting:
            future.set_result(buffer)

    def take_arrived(self) -> str | None:
        """Return :attr:`arrived`, and reset it."""
        arrived, self.arrived = self.arrived, None
        return arrived
