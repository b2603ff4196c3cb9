"""Steps that say nothing of the next ones: the first ones of a process, of a new batch size, and after a resume."""

from collections import deque
from typing import Any

from lightning_hetero.comm.timing.settings import SETTINGS, TimingSettings

__all__ = ["ColdStart", "WarmUp"]


class WarmUp:
    """Leave out the first steps of a process and of a batch size, and learn what a change of size costs.

    Args:
        settings: how many steps.

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

    def change_size(self, size: int) -> None:
        """Begin a step of another size than the one before."""
        if self.size is not None:
            self._sizes.add(self.size)
            self._skip, self._changed = max(self._skip, 1), None if size in self._sizes else []
            self.settling = True
        self.size = size

    def end_step(self, seconds: float) -> bool:
        """End a synchronised step; return whether it is left out.

        Args:
            seconds: that it took, loading left out.
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

        The lower one of the last two: another process may have run in one of them, or a compiler may have prepared for
        all sizes at once.
        """
        return min(self._costs) if len(self._costs) == self._costs.maxlen else None

    def state_dict(self) -> dict[str, Any]:
        """Return the steps to leave out, the size and the costs, as plain Python values."""
        return {"skip": self._skip, "size": self.size, "costs": list(self._costs)}

    def load_state_dict(self, state: dict[str, Any], *, warm: bool) -> None:
        """Go on with the costs of an earlier process; and with its steps to leave out, if they are known to be warm."""
        self._costs.extend(map(float, state.get("costs", ())))
        if warm:
            self._skip, self.size, self.settling = int(state["skip"]), state["size"], True


class ColdStart:
    """Tell which of the first steps after a resume took longer than usual.

    Args:
        settings: how many steps are judged, and by which factor.

    Attributes:
        usual: a batch size, and the seconds that a step of it takes to compute; ``None`` if that is not known.
    """

    def __init__(self, settings: TimingSettings = SETTINGS) -> None:
        self.settings = settings
        self.usual: tuple[float, float] | None = None
        self._until = 0

    def learn(self, usual: tuple[float, float] | None) -> None:
        """Take this for usual from now on."""
        self.usual = usual

    def resume(self, usual: tuple[float, float], step: int) -> None:
        """Judge the first steps after this one by what was usual in an earlier process."""
        self.usual, self._until = usual, step + self.settings.warm_up_steps

    def is_cold(self, number: float, size: float, seconds: float) -> bool:
        """Return whether a step took longer to compute than what is usual explains.

        Time grows no faster than the size of the batch.

        Args:
            number: of the step.
            size: its batch size.
            seconds: of computing.
        """
        if self.usual is None or number > self._until:
            return False
        usual_size, usual = self.usual
        return seconds > self.settings.max_cold_ratio * usual * max(size / usual_size, 1.0)
