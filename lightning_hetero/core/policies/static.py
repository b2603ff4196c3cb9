"""Policy with a fixed split in proportion to the workers' open-loop capacities (D sec. III-B)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.proportional import BY_CAPACITY, _in_proportion

__all__ = ["StaticPlanner"]


@checked_keywords
@dataclass(frozen=True)
class StaticPlanner:
    """Open-loop split by peak half-precision FLOP/s, taken once (D sec. III-B).

    Example:
        >>> context = PlanContext(9, ("a", "b"), (1, 1), capacities=(2.0, 1.0))
        >>> StaticPlanner().initial(context).plan.local_batch_sizes
        (6, 3)
    """

    moves_total: ClassVar[bool] = False

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose sizes in proportion to the capacities."""
        return _in_proportion(context.capacities, context, BY_CAPACITY)

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Keep the split."""
        return Decision(self)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Return ``None``: there is no time model."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: nothing is learned."""
        return {}

    def loaded(self, state: dict[str, Any]) -> "StaticPlanner":
        """Return this planner: there is nothing to load."""
        return self
