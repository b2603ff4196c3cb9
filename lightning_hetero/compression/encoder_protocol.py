"""Interfaces of block encoders: error feedback, selection and messages of one rank.

A :class:`BlockEncoder` turns gradients into a message. Encoders differ after the exchange: a :class:`HostEncoder` reads
all ranks' messages and knows the outcome of the step at once. A :class:`DeviceEncoder` leaves that to its GPU, for
which the host never waits, and reports the :class:`Outcome` one step later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from lightning_hetero.compression.layout import Layout, Slot
from lightning_hetero.compression.reference import Pack
from lightning_hetero.compression.score_scaling import ScoreScaling
from lightning_hetero.compression.selectors import SelectorState
from lightning_hetero.compression.wire_format import MessageFormat

__all__ = ["BlockEncoder", "DeviceEncoder", "HostEncoder", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step that a device has decided on.

    Args:
        step: its number.
        dropped: whether the step was skipped, because a gradient was not finite.
        blocks: blocks that all messages named.
    """

    step: int
    dropped: bool
    blocks: int


class BlockEncoder(Protocol):
    """Encoder of one rank, up to the exchange of messages, and after the step.

    One step calls :meth:`accumulate_bucket` for each bucket, :meth:`encode` or :meth:`give_up`, after the exchange the
    methods of the kind of encoder, and :meth:`finish`.
    """

    layout: Layout
    """Places of the parameters in the residual and in the sum."""
    form: MessageFormat
    """Format of its messages."""
    residual: torch.Tensor
    """Error feedback: what was not sent yet, flat, in the layout's order."""
    state: SelectorState
    """State that selection carries from step to step."""

    @property
    def merged(self) -> torch.Tensor:
        """Sum of all ranks' blocks, flat, 0 where nothing was sent; valid until :meth:`finish`."""

    def reform(self, form: MessageFormat) -> None:
        """Send messages of another format from the next step on; the residual is kept."""

    def accumulate_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, hold: bool = False
    ) -> bool:
        """Apply ``r += w g`` to parameters whose gradients lie one after the other, and score their blocks.

        Args:
            slots: the parameters' places.
            flat: their gradients; they must stay as they are until the step ends.
            weight: factor of the gradients.
            hold: whether the residual of a parameter waits for a later step if its gradient is all 0.

        Returns:
            ``False`` if a gradient is known not to be finite; this rank then has to :meth:`give_up`.
        """

    def encode(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> int | None:
        """Write the message of this step and subtract its values from the residual.

        Args:
            message: uint8, as long as the format says, receives the message.
            step: number of the step.
            bucket: number of the message in the step.
            rank: this rank.

        Returns:
            Number of its blocks, ``None`` if only the device knows it.
        """

    def give_up(self, message: torch.Tensor, *, step: int, bucket: int = 0, rank: int = 0) -> None:
        """Write a message that flags this rank's gradient as not finite."""

    def finish(self) -> None:
        """End the step: clear the sum."""


class HostEncoder(BlockEncoder, Protocol):
    """Encoder whose host reads messages, and knows the outcome of the step at once."""

    deferred: Literal[False]
    balance: ScoreScaling | None
    """Factors of the scores of each parameter, ``None`` for plain magnitudes."""

    def read(self, rows: torch.Tensor, *, step: int, bucket: int = 0) -> list[Pack] | None:
        """Return the packs of all ranks' messages; ``None`` if a rank says that its gradient is not finite.

        Raises:
            ValueError: if a message is malformed; all are checked before any is applied.
        """

    def merge(self, packs: list[Pack]) -> None:
        """Add packs in the order of ranks to :attr:`merged`."""

    def merge_sparse(self, packs: list[Pack]) -> Pack:
        """Return the sum of packs, in the order of ranks, as one pack."""

    def undo(self) -> None:
        """Skip the step: add what was sent back to the residual, then subtract the gradient, up to one rounding."""

    def take_back(self, message: torch.Tensor) -> None:
        """Add the values of this rank's message back to the residual, because no rank has applied it."""


class DeviceEncoder(BlockEncoder, Protocol):
    """Encoder whose device checks messages and decides on the step; the host learns the outcome later."""

    deferred: Literal[True]
    touched: torch.Tensor
    """Whether each block of the model is in a message of this step, bool, on the device."""

    @property
    def verdict(self) -> torch.Tensor:
        """On the device: 0 if the messages were merged, 1 if a gradient was not finite, 2 if a message is malformed."""

    def receive(self, rows: torch.Tensor, *, rank: int, step: int, bucket: int = 0) -> None:
        """Check the messages of all ranks; merge them if all are valid, else add what was sent back to the residual.

        Args:
            rows: one message in each row; row ``rank`` is this rank's own.
            rank: this rank.
            step: number of the step.
            bucket: number of the message in the step.

        Raises:
            ValueError: if ``rows`` has another shape than all messages have.
        """

    def deliver_bucket(
        self, slots: Sequence[Slot], flat: torch.Tensor, weight: float, *, scale: float, fill: float
    ) -> None:
        """Write ``scale`` times the sum of a bucket's parameters in place of their gradients.

        If the step is skipped, the gradients are subtracted from the residual, up to one rounding, and become ``fill``.
        """

    def outcome(self) -> Outcome | None:
        """Return the outcome of the last step, ``None`` if it was returned before; wait until the device has it.

        All ranks have seen the same messages, so all raise in the same step.

        Raises:
            ValueError: naming rank and bucket of a malformed message. Nothing of that step was applied.
        """
