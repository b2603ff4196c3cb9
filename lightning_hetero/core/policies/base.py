"""Interface of all policies: the context that they get, the decision that they return, and their protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations

__all__ = ["Decision", "PlanContext", "Planner", "Proposal", "check_planner", "moves_total"]


@dataclass(frozen=True)
class PlanContext:
    """Conditions that a planner has to respect.

    Args:
        total_batch_size: ``B`` of the next steps.
        identities: hardware identity of each rank; what a planner learns is stored under it.
        min_local: fewest samples of each rank.
        max_local: most samples of each rank, ``None`` for no limit.
        hysteresis: least predicted gain (share of the step time) for which a plan is changed.
        accumulation: micro-batches of a step; only the last is synchronized.
        capacities: open-loop capacity of each rank (peak FLOP/s).
        noise: gradient noise so far, ``None`` if it is not measured.
        epoch_begins: whether the next plan begins with an epoch: only then may ``accumulation`` change.
        link: link that compressed gradients cross, ``None`` without compression.
        given: the user's sizes to begin with, ``None`` if the policy finds its own.
        change_cost: seconds that a change of the plan costs, for recompiling or tuning; ``None`` if that is unknown.
        elapsed: steps since the last sync round, which may exceed the observed ones; ``None`` for the observed ones.

    Example:
        >>> PlanContext(40, ("a", "b"), (1, 1)).hysteresis
        0.0
    """

    total_batch_size: int
    identities: tuple[str, ...]
    min_local: tuple[int, ...]
    max_local: tuple[int, ...] | None = None
    hysteresis: float = 0.0
    accumulation: int = 1
    capacities: tuple[float, ...] = ()
    noise: RunningNoiseScale | None = None
    epoch_begins: bool = False
    link: MessageLink | None = None
    given: tuple[int, ...] | None = None
    change_cost: float | None = None
    elapsed: int | None = None


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


@dataclass(frozen=True)
class Decision:
    """Outcome of one sync round: all that the engine carries out. Unpacks to the planner and the proposal.

    Args:
        planner: the planner that has seen the observations, ``None`` if the decision is not a planner's.
        proposal: plan to change to, ``None`` to keep the current one.
        density: share of the gradient to send from now on, with its predictions; ``None`` leaves it unchanged.
        stale: whether gradients are applied one step late from now on; ``None`` leaves that unchanged.
        kept: why the plan stays, ``None`` if it changes or there is nothing to say. The log gives each text before the
            first colon only once in a run.
        soon: whether the next sync round should come as early as possible, because it is worth more than it costs.
        error: standard error in seconds of the step time predicted for the running plan, ``None`` if not known.
        moving: whether speeds more likely drift than stay constant; then sync rounds come more often if that is cheap.

    Example:
        >>> planner, proposal = Decision(None, kept="too few observations: 3 steps")
        >>> planner is proposal is None
        True
    """

    planner: "Planner | None"
    proposal: Proposal | None = None
    density: DensityChoice | None = None
    stale: bool | None = None
    kept: str | None = None
    soon: bool = False
    error: float | None = None
    moving: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter((self.planner, self.proposal))

    @classmethod
    def of(cls, outcome: Any) -> "Decision":
        """Convert the result of a planner's ``decide``: a decision, or a pair of planner and proposal.

        Raises:
            TypeError: if it is neither.

        Example:
            >>> Decision.of((None, None)) == Decision(None)
            True
        """
        if isinstance(outcome, cls):
            return outcome
        if isinstance(outcome, tuple) and len(outcome) == 2:
            return cls(*outcome)
        raise TypeError(
            f"decide() of a planner returned {outcome!r}; return Decision(planner, proposal), or the pair of both with "
            "None for no proposal."
        )


@runtime_checkable
class Planner(Protocol):
    """Protocol of every policy."""

    @property
    def moves_total(self) -> bool:
        """True if the planner changes the total batch: then a resumed run continues with the total that it reached."""

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose a plan before any step, from what is already known; ``None`` for equal sizes."""

    def decide(
        self, observations: StepObservations, current: BatchPlan, context: PlanContext
    ) -> "Decision | tuple[Planner, Proposal | None]":
        """Return the planner that has seen the observations, and a plan to change to; ``None`` keeps the current one.

        The observations have at least one step, except between two epochs for a planner that changes the total.
        """

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict the seconds of a step under ``plan``, ``None`` where the policy has no model."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""

    def loaded(self, state: dict[str, Any]) -> "Planner":
        """Return the planner restored from :meth:`state_dict`."""


def moves_total(planner: Planner | None) -> bool:
    """Return whether there is a planner that changes the total batch.

    Example:
        >>> from lightning_hetero.core.policies.static import StaticPlanner
        >>> moves_total(None), moves_total(StaticPlanner())
        (False, False)
    """
    return planner is not None and planner.moves_total


OFFERED = ("moves_total", "initial", "decide", "predict", "state_dict", "loaded")


def check_planner(planner: Any) -> Planner:
    """Check that a planner implements :class:`Planner`, and return it.

    Raises:
        TypeError: if it does not; the error names what is missing.

    Example:
        >>> from lightning_hetero.core.policies.static import StaticPlanner
        >>> check_planner(StaticPlanner()).moves_total
        False
    """
    if isinstance(planner, Planner):
        return planner
    lacks = ", ".join(name for name in OFFERED if name not in dir(planner))
    raise TypeError(
        f"planner={planner!r} lacks {lacks}. See lightning_hetero.core.policies.base.Planner; moves_total = False says "
        "that the total batch stays."
    )
