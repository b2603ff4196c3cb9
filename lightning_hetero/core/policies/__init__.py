"""The table of policies: from observations to the next plan, as pure values.

A planner is replaced, never changed in place: ``decide(observations, current, context) -> (planner, proposal)``. It
can be replayed, checkpointed and tested with no process and no clock. A new policy is a module of this package and a
line of :data:`POLICIES`, which all that list policies read: settings, callbacks, sessions, the command line and tests.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hetero.core.policies.base import Planner

__all__ = ["DEFAULT", "NAMED", "POLICIES", "PolicyEntry", "policy_name"]


@dataclass(frozen=True)
class PolicyEntry:
    """A policy: the class of its planner, which is imported when it is first made, and what it cannot do without.

    Args:
        planner: ``module.Class`` of this package; ``None`` for a split that stays as it is.
        needs: settings that have to be given for it; ``policy=`` may name it only if there are none.

    Example:
        >>> PolicyEntry("static.StaticPlanner").factory()
        StaticPlanner()
    """

    planner: str | None
    needs: tuple[str, ...] = ()

    @property
    def factory(self) -> Callable[..., Planner | None]:
        """Return what makes the planner from its settings."""
        if self.planner is None:
            return lambda: None
        module, _, name = self.planner.partition(".")
        factory: Callable[..., Planner] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return factory


POLICIES = {
    "perf_model": PolicyEntry("perf_model.PerfModelPlanner"),
    "pid": PolicyEntry("proportional.ProportionalPlanner"),
    "static": PolicyEntry("static.StaticPlanner"),
    "even": PolicyEntry(None),
    "goodput": PolicyEntry("goodput.GoodputPlanner", needs=("max_total_batch_size",)),
    "time_to_accuracy": PolicyEntry("time_to_accuracy.TimeToAccuracyPlanner", needs=("compression",)),
}
"""All policies by name."""

DEFAULT = "perf_model"
"""The policy of settings that name none."""

NAMED = tuple(name for name, entry in POLICIES.items() if not entry.needs)
"""Policies that ``policy=`` may name."""


def policy_name(planner: Planner | None) -> str:
    """Return the name of a planner's policy, ``"fixed"`` without one, the full name of a class that is not ours.

    Example:
        >>> policy_name(POLICIES["pid"].factory()), policy_name(None)
        ('pid', 'fixed')
    """
    if planner is None:
        return "fixed"
    cls = type(planner)
    known = {f"{__name__}.{entry.planner}": name for name, entry in POLICIES.items()}
    full = f"{cls.__module__}.{cls.__qualname__}"
    return known.get(full, full)
