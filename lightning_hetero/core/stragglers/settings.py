"""Settings of the detection of stragglers."""

from dataclasses import dataclass

__all__ = ["StragglerSettings"]


@dataclass(frozen=True)
class StragglerSettings:
    """Limits of the detection.

    Args:
        min_cost: least share of the step that a straggler costs.
        min_lasting_cost: the same for a worker that was slower from the start.
        deviations: standard errors by which a worker must exceed its own past.
        first_deviation: deviation of whole rounds, as a share of the time, that is assumed before it is known.
        min_deviation: least such deviation; timings of real machines are no better.
        min_steps: fewest steps of a round that are judged.
        lasting_rounds: rounds without a change of the split after which a slower worker counts as a lasting straggler.
        weight: weight of a new round in a worker's past, once several are known.
        ended: share of the least cost below which a straggler counts as relieved. So it does below this share of the
            excess that it began with, if that is no more than would make it a straggler now.

    Example:
        >>> StragglerSettings().min_cost
        0.05
    """

    min_cost: float = 0.05
    min_lasting_cost: float = 0.1
    deviations: float = 5.0
    first_deviation: float = 0.03
    min_deviation: float = 0.01
    min_steps: int = 4
    lasting_rounds: int = 3
    weight: float = 0.2
    ended: float = 0.5
