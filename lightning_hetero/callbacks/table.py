"""The callback of each policy, by the name that settings give it."""

from collections.abc import Callable

from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.callbacks.perf_model import PerfModelCallback
from lightning_hetero.callbacks.pid import DynamicBatchPIDCallback
from lightning_hetero.core.policies import DEFAULT, NAMED, POLICIES
from lightning_hetero.core.validation import check_choice

__all__ = ["policy_callback"]

OWN: dict[str, Callable[[], PolicyCallback]] = {"perf_model": PerfModelCallback, "pid": DynamicBatchPIDCallback}
"""Policies whose callback has a class of its own; planners of all others run in :class:`PolicyCallback`."""


def policy_callback(policy: str | None) -> PolicyCallback:
    """Return the callback of a policy by name; ``None`` is the default, ``"fixed"`` a split that never changes.

    Raises:
        ValueError: if no policy has the name, or the policy needs more than a name.

    Example:
        >>> type(policy_callback(None)).__name__
        'PerfModelCallback'
    """
    name = check_choice("policy", DEFAULT if policy is None else policy, (*NAMED, "fixed"))
    if name in OWN:
        return OWN[name]()
    return PolicyCallback(None if name == "fixed" else POLICIES[name].factory())
