"""Access to the plans of a run, the same through every front end."""

from typing import TYPE_CHECKING

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.engine import HeteroEngine

__all__ = ["PlanAccess"]


class PlanAccess:
    """Access to the plans of a run, which every front end offers its users.

    A front end has an ``engine`` once its process group exists; ``_no_engine`` is its error until then.
    """

    if TYPE_CHECKING:  # an attribute of some front ends, a property of others

        @property
        def engine(self) -> HeteroEngine | None:
            """The engine, ``None`` before the process group exists."""

    _no_engine = "there are no plans and observations yet: they come when training begins."

    @property
    def plan(self) -> BatchPlan | None:
        """The split of the running step."""
        return None if self.engine is None else self.engine.plan

    @property
    def plan_history(self) -> tuple[PlanEntry, ...]:
        """All plans of this run, with the step from which each held and the reason."""
        return () if self.engine is None else self.engine.plan_history

    def observations(self) -> StepObservations:
        """Return what all ranks measured up to the last sync round."""
        return self._known_engine().observations()

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Change the split, from a step that no rank has drawn yet; all ranks have to call it together."""
        return self._known_engine().adopt(plan, reason, not_before=self._reached)

    @property
    def _reached(self) -> tuple[int, int]:
        """Earliest epoch and step at which a new plan may hold."""
        return (0, 0)

    def _known_engine(self) -> HeteroEngine:
        if self.engine is None:
            raise RuntimeError(self._no_engine)
        return self.engine
