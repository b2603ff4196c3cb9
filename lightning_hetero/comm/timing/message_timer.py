"""Time the messages of compressed gradients: how long each rank's takes, apart from waiting for stragglers.

A message takes long for one of two reasons: its sender is a straggler, or the link has a low bandwidth. Clocks of two
ranks are never compared; but the rank that is ready last in a step waits for nobody, so that what it sees is the link
alone. It is the one for which all messages of the step are there soonest after its own was ready.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.timing.clock import Clock, Mark
from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings

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
    """Mark when this rank's message is ready, and when each rank's has arrived, with no synchronisation.

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
        """Begin to send ``num_bytes``; call what is returned with each rank whose message has arrived."""
        sent = _Sent(step, num_bytes, self.clock.mark())
        self._steps.append(sent)

        def arrived(peer: int) -> None:
            sent.arrivals[peer] = self.clock.mark()

        return arrived

    def take(self) -> Array:
        """Return the steps since the last call whose messages have all arrived.

        Returns:
            shape ``(max_steps, 2 + ranks)``: number of the step, bytes that this rank sent, seconds until each
            rank's message was there. Rows that are not used are NaN.
        """
        table = np.full((self.settings.max_steps, 2 + self.world_size), np.nan)
        rows, self._rows = self.rows()[-self.settings.max_steps :], []
        table[: len(rows)] = np.array(rows).reshape(len(rows), 2 + self.world_size)
        return table

    def rows(self) -> list[list[float]]:
        """Return what :meth:`take` would, without taking it: for a checkpoint."""
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
    """Return the bytes that a rank sent in a step and the seconds of each rank's message: medians over common steps.

    Args:
        tables: :meth:`MessageTimer.take` of every rank, shape ``(ranks, max_steps, 2 + ranks)``.

    Returns:
        Bytes and seconds per rank, as the rank saw them that was ready last; ``None`` if there is no common step.

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
    newest = sent[:, 0] == sent[-1, 0]  # those of one density
    last = seconds.max(axis=2).argmin(axis=1)
    seen = seconds[np.arange(len(last)), last]
    return float(sent[-1].max()), np.median(seen[newest], axis=0)
