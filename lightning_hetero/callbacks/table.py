"""The callback of each policy, by the name that settings give it."""

from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.callbacks.perf_model import PerfModelCallback
from lightning_hetero.callbacks.pid import DynamicBatchPIDCallback
from lightning_hetero.core.policies.perf_model import PLANNERS

__all__ = ["policy_callback"]


def policy_callback(policy: str | None) -> PolicyCallback:
    """The callback of a policy by name; ``None`` is the default; ``"even"`` and ``"fixed"`` never change the split.

    Example:
        >>> type(policy_callback(None)).__name__
        'PerfModelCallback'
    """
    if policy in ("even", "fixed"):
        return PolicyCallback(None)
    if policy in (None, "perf_model"):
        return PerfModelCallback()
    if policy == "pid":
        return DynamicBatchPIDCallback()
    return PolicyCallback(PLANNERS[policy]())  # type: ignore[index]
