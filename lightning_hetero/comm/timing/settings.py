"""Settings of the timers."""

from dataclasses import dataclass

__all__ = ["SETTINGS", "TimingSettings"]


@dataclass(frozen=True)
class TimingSettings:
    """Numbers of steps that are timed and that are left out.

    Args:
        max_steps: newest steps that each timer keeps for a sync round, one row of an exchanged table each.
        warm_up_steps: first synchronized steps of a process, which are left out.
        change_costs: newest measured costs of a change of batch size; the lowest counts.
    """

    max_steps: int = 32
    warm_up_steps: int = 3
    change_costs: int = 2


SETTINGS = TimingSettings()
