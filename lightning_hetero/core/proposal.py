"""What every policy is given and gives back: context, proposal, and the functions between them."""

from dataclasses import dataclass
from typing import Any, Protocol

from lightning_hetero.core.bandwidth import MessageLink
from lightning_hetero.core.noise_scale import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.plan import BatchPlan

__all__ = ["PlanContext", "Planner", "Proposal"]


@dataclass(frozen=True)
class PlanContext:
    """What a planner has to respect.

    Args:
        total_batch_size: ``B`` of the next steps.
        identities: hardware identity of each rank, the key of what was learned.
        min_local: fewest samples of each rank.
        max_local: most samples of each rank, ``None`` for no limit.
        hysteresis: least predicted gain (share of the step time) for which a plan is changed.
        accumulation: micro-batches of a step; only the last is synchronised.
        capacities: open-loop capacity of each rank (peak FLOP/s).
        noise: gradient noise so far, ``None`` if nobody measures it.
        epoch_begins: whether the next plan begins with an epoch, so that ``accumulation`` may change with it.
        link: what compressed gradients cross, ``None`` if there are none.
        given: sizes to begin with that the user gave, ``None`` if the policy finds its own.

    Example:
        >>> PlanContext(40, ("a", "b"), (1, 1)).hysteresis
        0.03
    """

    total_batch_size: int
    identities: tuple[str, ...]
    min_local: tuple[int, ...]
    max_local: tuple[int, ...] | None = None
    hysteresis: float = 0.03
    accumulation: int = 1
    capacities: tuple[float, ...] = ()
    noise: RunningNoiseScale | None = None
    epoch_begins: bool = False
    link: MessageLink | None = None
    given: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Proposal:
    """A plan, and why.

    Args:
        plan: plan to adopt.
        reason: one sentence for the log, with the expected gain.

    Example:
        >>> Proposal(BatchPlan(8, (6, 2)), "optimum of the time model").plan.local_batch_sizes
        (6, 2)
    """

    plan: BatchPlan
    reason: str


class Planner(Protocol):
    """What every policy offers."""

    def initial(self, context: PlanContext) -> Proposal | None:
        """Plan before any step, from what is already known; ``None`` for equal sizes."""

    def decide(
        self, observations: StepObservations, current: BatchPlan, context: PlanContext
    ) -> tuple["Planner", Proposal | None]:
        """The planner that has seen the observations, and a plan to change to, or ``None`` to keep the current one."""

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predicted seconds of a step under ``plan``, ``None`` where the policy has no model."""

    def state_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for any checkpoint."""

    def loaded(self, state: dict[str, Any]) -> "Planner":
        """The planner with what :meth:`state_dict` described."""
