"""All-gather of sync rounds: sampler positions and payloads of all ranks in one message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.agreement.control_plane import ControlPlane, check_digests

__all__ = ["Padding", "SyncPayload", "gather_payloads"]

Array = npt.NDArray[np.float64]


class SyncPayload(Protocol):
    """Numbers that ranks exchange in a sync round."""

    def pack(self) -> Array:
        """Return this rank's numbers as a flat array, of the same length on all ranks."""

    def unpack(self, everyone: Array, control: ControlPlane) -> None:
        """Take in the numbers of all ranks, one row for each; every rank calls it, so it may be collective."""


@dataclass(frozen=True)
class Padding:
    """Zeros in place of a payload that this run does not have: the message has the same length either way.

    Args:
        length: numbers of that payload.

    Example:
        >>> Padding(2).pack().tolist()
        [0.0, 0.0]
    """

    length: int

    def pack(self) -> Array:
        """Return zeros."""
        return np.zeros(self.length)

    def unpack(self, everyone: Array, control: ControlPlane) -> None:
        """Ignore what all ranks sent."""


def gather_payloads(
    control: ControlPlane, held: tuple[int, int, int], payloads: Sequence[SyncPayload]
) -> list[tuple[int, int]]:
    """Gather all payloads in one message, and give each payload its part; a collective call.

    Args:
        control: control plane that gathers.
        held: digest of this rank's plans, then epoch and step up to which it has drawn batches.
        payloads: the same ones in the same order on all ranks.

    Returns:
        ``(epoch, step)`` up to which each rank has drawn.

    Raises:
        PlanMismatchError: if a rank holds other plans.
    """
    parts = [np.array(held, dtype=float), *(payload.pack() for payload in payloads)]
    everyone = control.gather(np.concatenate(parts))
    check_digests(everyone[:, 0])
    _, *rest = np.split(everyone, np.cumsum([len(part) for part in parts])[:-1], axis=1)
    for payload, rows in zip(payloads, rest, strict=True):
        payload.unpack(rows, control)
    return [(int(row[1]), int(row[2])) for row in everyone]
