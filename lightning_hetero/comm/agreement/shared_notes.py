"""Notes that a rank takes at any time, such as of a signal, and that all ranks read at the same step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["SharedNotes"]


class SharedNotes:
    """Numbers of all ranks, exchanged over the host-side group and read a step later, so that no rank waits.

    Args:
        control: control plane of the ranks.
        count: how many numbers a rank notes.

    Example:
        >>> notes = SharedNotes(ControlPlane(0, 1), 2)
        >>> notes.take(), notes.send([15, 0]), notes.take()
        ([0, 0], None, [15, 0])
    """

    def __init__(self, control: ControlPlane, count: int) -> None:
        self._control, self._none = control, [0] * count
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None
        self._begin_maximum: Callable[[torch.Tensor], Any] | None = None

    def send(self, notes: Sequence[int]) -> None:
        """Send what this rank has noted; all ranks do so at the same step."""
        values, work = torch.tensor(notes), None
        if self._control.world_size > 1:
            self._begin_maximum = self._begin_maximum or self._control.maximum_later()
            work = self._begin_maximum(values)
        self._sent = values, work

    def take(self) -> list[int]:
        """Return the maximum over all ranks of what was sent last; zeros if nothing was sent since the last call."""
        if self._sent is None:
            return list(self._none)
        (values, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        found: list[int] = values.tolist()
        return found
