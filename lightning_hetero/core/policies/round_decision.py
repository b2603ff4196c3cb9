"""Decision of a sync round: from what was observed to what holds from now on, the same in a run and in a simulation."""

from collections.abc import Callable
from dataclasses import replace

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner

__all__ = ["decide_round"]


def decide_round(
    planner: Planner | None,
    observations: StepObservations,
    running: BatchPlan | None,
    upcoming: BatchPlan | None,
    context: Callable[[], PlanContext],
) -> tuple[Decision, tuple[float | None, float | None]]:
    """Return a planner's checked decision, and the predicted seconds of a step of the running plan with their error.

    Args:
        planner: planner that decides, ``None`` to keep the plan.
        observations: measurements of all workers since the last sync round.
        running: plan of the newest step, ``None`` before there is one.
        upcoming: newest plan; it differs from the running one while batches that were drawn before still run.
        context: returns the conditions of the upcoming plan; not called if there is nothing to decide.

    Example:
        >>> from lightning_hetero.core.policies.static import StaticPlanner
        >>> plan = BatchPlan(8, (4, 4))
        >>> decision, _ = decide_round(StaticPlanner(), StepObservations.empty(2), plan, plan, context=lambda: None)
        >>> decision.kept
        'too few observations: no timed step'
    """
    if planner is None or running is None or upcoming is None:
        return Decision(planner), (None, None)
    if not (observations.num_steps or planner.moves_total):
        return Decision(planner, kept="too few observations: no timed step"), (None, None)
    conditions = context()
    if not (observations.num_steps or conditions.epoch_begins):
        return Decision(planner, kept="too few observations: no timed step"), (None, None)
    outcome = planner.decide(observations, upcoming, conditions)
    decision = Decision.of(outcome, planner, upcoming.total_batch_size)
    now = replace(conditions, total_batch_size=running.total_batch_size, noise=None, epoch_begins=False)
    predicted = (decision.planner or planner).predict(running, now)
    return decision, (predicted, decision.error if upcoming == running else None)
