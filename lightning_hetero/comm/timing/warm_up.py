"""Warm-up steps, whose times predict nothing: the first ones of a process and of a new batch size."""

from collections import deque

from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings

__all__ = ["WarmUp"]


class WarmUp:
    """Filter of the first steps of a process and of a batch size, and estimate of the cost of a change of size.

    Args:
        settings: how many steps are left out.

    Attributes:
        size: batch size of the newest step.
        settling: whether the running step is to be reported to :meth:`end_step`.
    """

    def __init__(self, settings: TimingSettings = SETTINGS) -> None:
        self.size: int | None = None
        self.settling = True
        self._skip = settings.warm_up_steps
        self._sizes: set[int] = set()
        self._changed: list[float] | None = None  # seconds of the steps since the size changed to a new one
        self._costs: deque[float] = deque(maxlen=settings.change_costs)

    def shorten(self) -> None:
        """Leave out no more than one step: a density waits for the next, whose rough time is better than none."""
        self._skip = min(self._skip, 1)

    def change_size(self, size: int) -> None:
        """Note that the step that begins has another size than the one before."""
        if self.size is not None:
            self._sizes.add(self.size)
            self._skip, self._changed = max(self._skip, 1), None if size in self._sizes else []
            self.settling = True
        self.size = size

    def end_step(self, seconds: float) -> bool:
        """End a synchronized step; return whether it is left out.

        Args:
            seconds: its duration without loading.
        """
        left_out, self._skip = self._skip > 0, max(0, self._skip - 1)
        if self._changed is not None:
            self._changed.append(seconds)
            if len(self._changed) == 2:
                first, second = self._changed
                self._costs.append(max(first - second, 0.0))
                self._changed = None
        self.settling = self._skip > 0 or self._changed is not None
        return left_out

    @property
    def change_cost(self) -> float | None:
        """Seconds by which the first step with a new size takes longer than the next; ``None`` before two were seen.

        This is the lower of the last two measurements: another process may have run during one of them, or a compiler
        may have prepared for all sizes at once.
        """
        return min(self._costs) if len(self._costs) == self._costs.maxlen else None
