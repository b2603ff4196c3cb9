"""Timer of compressed messages: how long each rank's takes on the link, without waiting for stragglers.

A message takes long for one of two reasons: its sender is a straggler, or the link has a low bandwidth. Clocks of two
ranks are never compared. But the rank that is ready last in a step waits for nobody, so it measures the link alone. It
is the rank with the shortest time from its own message being ready to the arrival of all messages of the step.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.clock import Clock, Mark
from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings
from lightning_hetero.core.link.message_times import NEWEST

__all__ = ["MessageTimer", "message_seconds"]

Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Sent:
    """The messages of one step."""

    step: int
    num_bytes: float
    start: Mark
    arrivals: dict[int, Mark] = field(default_factory=dict)


class MessageTimer:
    """Marks of this rank's message being ready and of each rank's arriving, without synchronization.

    Args:
        clock: marks moments on this rank's device.
        world_size: number of ranks.
        settings: how many steps are kept.
    """

    def __init__(self, clock: Clock, world_size: int, settings: TimingSettings = SETTINGS) -> None:
        self.clock, self.world_size, self.settings = clock, world_size, settings
        self._steps: deque[_Sent] = deque(maxlen=settings.max_steps)
        self._rows: list[list[float]] = []

    def send(self, step: int, num_bytes: float) -> Callable[[int], None]:
        """Mark the sending of ``num_bytes``; call the result with each rank whose message has arrived."""
        sent = _Sent(step, num_bytes, self.clock.mark())
        self._steps.append(sent)

        def arrived(peer: int) -> None:
            sent.arrivals[peer] = self.clock.mark()

        return arrived

    def take(self) -> Array:
        """Return the steps since the last call whose messages have all arrived.

        Returns:
            shape ``(max_steps, 2 + ranks)``: number of the step, bytes that this rank sent, seconds until each
            rank's message had arrived. Unused rows are NaN.
        """
        table = np.full((self.settings.max_steps, 2 + self.world_size), np.nan)
        rows, self._rows = self.rows()[-self.settings.max_steps :], []
        table[: len(rows)] = np.array(rows).reshape(len(rows), 2 + self.world_size)
        return table

    def rows(self) -> list[list[float]]:
        """Return the rows that :meth:`take` would, and keep them: for a checkpoint."""
        left = []
        for sent in self._steps:
            marks = [sent.arrivals.get(peer) for peer in range(self.world_size)]
            if all(mark is not None and self.clock.ready(mark) for mark in marks):
                seconds = [self.clock.seconds(sent.start, mark) for mark in marks]
                self._rows.append([float(sent.step), float(sent.num_bytes), *seconds])
            else:
                left.append(sent)
        self._steps = deque(left, maxlen=self.settings.max_steps)
        return self._rows


def message_seconds(tables: Array) -> tuple[float, Array] | None:
    """Return the bytes that a rank sends in a step, and the median seconds of each rank's message over common steps.

    Only the newest steps count, and of these those with the newest message size, because the density may have changed.

    Args:
        tables: :meth:`MessageTimer.take` of every rank, shape ``(ranks, max_steps, 2 + ranks)``.

    Returns:
        Bytes (most of all ranks), and seconds per rank as the last ready rank saw them; ``None`` without a common step.

    Example:
        >>> first, second = np.full((2, 32, 4), np.nan)
        >>> first[0] = [7, 1000.0, 0.001, 0.5]  # waits for the second rank, which computes for longer
        >>> second[0] = [7, 1000.0, 0.020, 0.001]
        >>> num_bytes, seconds = message_seconds(np.stack([first, second]))
        >>> num_bytes, seconds.tolist()
        (1000.0, [0.02, 0.001])
    """
    steps = [set(table[np.isfinite(table[:, 0]), 0].tolist()) for table in tables]
    common = sorted(set.intersection(*steps))
    if not common:
        return None
    rows = np.array([[table[table[:, 0] == number][0, 1:] for table in tables] for number in common])
    sent, seconds = rows[:, :, 0], rows[:, :, 1:]
    newest = sent[:, 0] == sent[-1, 0]  # the same density as the newest step
    last = seconds.max(axis=2).argmin(axis=1)
    seen = seconds[np.arange(len(last)), last]
    return float(sent[-1].max()), np.median(seen[newest][-NEWEST:], axis=0)
