"""The table of policies: from observations to the next plan, as pure values.

A planner is replaced, never changed in place: ``decide(observations, current, context) -> (planner, proposal)``. It
can be replayed, checkpointed and tested with no process and no clock. A new policy is a module of this package and a
line of :data:`POLICIES`: settings, callbacks, sessions, the command line and tests all read that table.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies.base import Planner

__all__ = ["DEFAULT", "NAMED", "POLICIES", "PolicyEntry", "policy_name", "same_policy"]

_CORE = __name__.rpartition(".")[0]


@checked_keywords
@dataclass(frozen=True)
class PolicyEntry:
    """A policy: the class of its planner, imported on first use, and the settings that it requires.

    Args:
        planner: ``package.module.Class`` below ``lightning_hetero.core``; ``None`` for a split that never changes.
        needs: settings that the user has to give for it; ``policy=`` may name it only if there are none.

    Example:
        >>> PolicyEntry("policies.static.StaticPlanner").factory()
        StaticPlanner()
    """

    planner: str | None
    needs: tuple[str, ...] = ()

    @property
    def factory(self) -> Callable[..., Planner | None]:
        """Function that makes the planner from its settings."""
        if self.planner is None:
            return lambda: None
        module, _, name = self.planner.rpartition(".")
        factory: Callable[..., Planner] = getattr(importlib.import_module(f"{_CORE}.{module}"), name)
        return factory


POLICIES = {
    "perf_model": PolicyEntry("planning.planner.PerfModelPlanner"),
    "pid": PolicyEntry("policies.proportional.ProportionalPlanner"),
    "static": PolicyEntry("policies.static.StaticPlanner"),
    "even": PolicyEntry(None),
    "goodput": PolicyEntry("policies.goodput.GoodputPlanner", needs=("max_total_batch_size",)),
    "time_to_accuracy": PolicyEntry("policies.time_to_accuracy.TimeToAccuracyPlanner", needs=("compression",)),
}
"""All policies by name."""

DEFAULT = "perf_model"
"""The policy of settings that name none."""

NAMED = tuple(name for name, entry in POLICIES.items() if not entry.needs)
"""Policies that ``policy=`` may name."""


def policy_name(planner: Planner | None) -> str:
    """Return the name of a planner's policy: ``"fixed"`` for none, the full class name if it is not in the table.

    Example:
        >>> policy_name(POLICIES["pid"].factory()), policy_name(None)
        ('pid', 'fixed')
    """
    if planner is None:
        return "fixed"
    cls = type(planner)
    known = {f"{_CORE}.{entry.planner}": name for name, entry in POLICIES.items()}
    full = f"{cls.__module__}.{cls.__qualname__}"
    return known.get(full, full)


_FORMER_NAMES = {
    "lightning_hetero.core.adaptive.GoodputPlanner": "goodput",
    "lightning_hetero.core.tta_planner.TimeToAccuracyPlanner": "time_to_accuracy",
}
"""Names of policies in checkpoints of earlier versions."""


def same_policy(saved: str | None, planner: Planner | None) -> bool:
    """Return whether a checkpoint's policy, named as :func:`policy_name` does, or did in earlier versions, is this one.

    Example:
        >>> same_policy("pid", POLICIES["pid"].factory()), same_policy(None, POLICIES["pid"].factory())
        (True, False)
    """
    return _FORMER_NAMES.get(saved or "", saved) == policy_name(planner)
