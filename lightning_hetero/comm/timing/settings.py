"""Settings of the timers."""

from dataclasses import dataclass

__all__ = ["SETTINGS", "TimingSettings"]


@dataclass(frozen=True)
class TimingSettings:
    """Steps that are timed, and steps that are left out.

    Args:
        max_steps: newest steps that each timer keeps for a sync round; the rows of the tables that ranks exchange.
        warm_up_steps: first synchronised steps of a process, which are left out.
        change_costs: newest costs of a change of size, of which the lowest counts.
    """

    max_steps: int = 32
    warm_up_steps: int = 3
    change_costs: int = 2


SETTINGS = TimingSettings()
