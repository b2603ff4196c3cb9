"""Settings of the planner."""

from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_fields


@checked_keywords
@dataclass(frozen=True)
class PlannerSettings:
    """Settings of the time model and of the rule that changes a split.

    Args:
        still: steps over which the times of a steady worker are averaged, above 0.
        moving: steps over which the level of a drifting one is, above 0.
        fixed_share: standard deviation of the fixed share of a step around the usual one, of a worker seen at one size,
            above 0.
        curvature: relative standard deviation of a worker's times around its line, above 0.
        unseen: share of the usual elasticity that comes back below the sizes that were seen, 0 to 1.
        jump: standard errors beyond which a round shows that a speed has jumped, above 0.
        least_gain: least predicted gain of a change, as a share of the step, 0 to 1.
        doubt: multiple of what chance alone would predict that a gain has to exceed, ``>= 0``.

    Raises:
        TypeError: if a setting is not a number.
        ValueError: if a setting is out of its range.
    """

    still: float = 400.0
    moving: float = 5.0
    fixed_share: float = 0.35
    curvature: float = 0.05
    unseen: float = 0.25
    jump: float = 5.0
    least_gain: float = 0.007
    doubt: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, ("still", "moving", "fixed_share", "curvature", "jump"), include_low=False)
        check_fields(self, ("unseen", "least_gain"), high=1.0)
        check_fields(self, ("doubt",))


DEFAULTS = PlannerSettings()
