"""Proportional control of batch sizes as a Lightning callback (dynamic batching, sec. III-C)."""

from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.validation import check_choice, check_number

__all__ = ["DynamicBatchPIDCallback"]


@checked_keywords
class DynamicBatchPIDCallback(PolicyCallback):
    """Policy that equalizes compute times by proportional control, without a time model (dynamic batching, sec. III-C).

    Args:
        dead_band: sizes change only if one of them would change by more than this share, 0 to 1.
        decay: weight of the past in the moving average of compute times, 0 to 1.
        start: sizes to begin with: ``"open_loop"``, in proportion to peak half-precision FLOP/s (cores, among equal
            CPUs), or ``"equal"``. The sizes of ``HeteroDDPStrategy(policy="pid", local_batch_sizes=[...])`` take
            precedence, and so does what an earlier run has learned on the same hardware.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Example:
        >>> DynamicBatchPIDCallback(dead_band=0.1).policy
        'pid'
    """

    def __init__(self, dead_band: float = 0.05, decay: float = 0.9, start: str = "open_loop") -> None:
        check_number("dead_band", dead_band, low=0.0, high=1.0)
        check_number("decay", decay, low=0.0, high=1.0)
        check_choice("start", start, ("open_loop", "equal"))
        super().__init__(ProportionalPlanner(dead_band=dead_band, decay=decay, start=start))
