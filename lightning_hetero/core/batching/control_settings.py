"""Settings of the proportional controller of batch sizes (D sec. III-C)."""

from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.timing.step_times import SmoothingSettings
from lightning_hetero.core.validation import check_fields, check_int

__all__ = ["CONTROL_DEFAULTS", "ControlSettings"]


@checked_keywords
@dataclass(frozen=True)
class ControlSettings:
    """Settings of the controller and of its estimates of the workers' times.

    The dead band and the weight of the past in the moving average are arguments of the planner, set by users.

    Args:
        times: how the workers' times are smoothed.
        min_steps: least number of steps at the current sizes for a decision, ``>= 1``; with fewer, the controller waits
            for the next sync round.
        significant_errors: standard errors by which times have to differ before sizes change, ``>= 0``.
        min_throughput_change: least relative change of a worker's throughput that counts as a change, 0 to 1.
        first_bound_lifetime: decisions for which a learned bound holds at first, ``>= 1``.
        bound_lifetime_growth: factor on the lifetime each time that the fall of throughput recurs, ``>= 1``.
        longest_bound_lifetime: most decisions for which a bound holds, since its cause may be over, ``>= 1``.
        finishing_dead_band: share of the dead band that applies after a change based on few noisy steps, 0 to 1.
        gain_after_reversal: factor on the gain (the share of the rule's step that is taken) of a size that reverses its
            direction, above 0, to 1.
        gain_growth: factor on the gain of a size that keeps its direction, ``>= 1``.
        gain_recovery: factor on the gain after a decision that changed nothing, ``>= 1``.
        min_gain: least gain, above 0, to 1.

    Raises:
        TypeError: if a setting has the wrong type.
        ValueError: if a setting is out of its range.

    Example:
        >>> ControlSettings().min_steps
        3
    """

    times: SmoothingSettings = SmoothingSettings()
    min_steps: int = 3
    significant_errors: float = 4.0
    min_throughput_change: float = 0.1
    first_bound_lifetime: int = 2
    bound_lifetime_growth: int = 4
    longest_bound_lifetime: int = 128
    finishing_dead_band: float = 0.5
    gain_after_reversal: float = 0.5
    gain_growth: float = 2.0
    gain_recovery: float = 1.25
    min_gain: float = 2.0**-6

    def __post_init__(self) -> None:
        for name in ("min_steps", "first_bound_lifetime", "bound_lifetime_growth", "longest_bound_lifetime"):
            check_int(f"ControlSettings.{name}", getattr(self, name), minimum=1)
        check_fields(self, ("significant_errors",))
        check_fields(self, ("min_throughput_change", "finishing_dead_band"), high=1.0)
        check_fields(self, ("gain_after_reversal", "min_gain"), high=1.0, include_low=False)
        check_fields(self, ("gain_growth", "gain_recovery"), low=1.0)


CONTROL_DEFAULTS = ControlSettings()
