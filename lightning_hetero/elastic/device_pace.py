"""Pace of claims: a host claims no batches faster than its device trains on them."""

from collections import deque
from typing import Any

from lightning_hetero.comm.timing.clock import Clock

__all__ = ["DevicePace"]


class DevicePace:
    """Limit of a host to one batch ahead of its device.

    A host queues batches far faster than its GPU trains on them; without a limit, a slow GPU would claim as many as a
    fast one. One batch stays in the queue, so the device does not wait for the host either.

    Args:
        clock: clock of the device.

    Example:
        >>> from lightning_hetero.comm.timing.clock import HostClock
        >>> DevicePace(HostClock()).end_batch()
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._marks: deque[Any] = deque()

    def end_batch(self) -> None:
        """Wait, with a batch in the queue, until the device has done the one before it."""
        self._marks.append(self.clock.mark())
        if len(self._marks) > 1:
            self.clock.wait_for(self._marks.popleft())
