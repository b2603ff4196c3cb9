"""Interface of all policies: the context that they get, the decision that they return, and their protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.objective import DensityChoice
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations

__all__ = [
    "Decision",
    "PlanContext",
    "Planner",
    "Proposal",
    "check_planner",
    "check_proposal",
    "load_planner",
    "moves_total",
]


@checked_keywords
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
        multiple: samples of which the total and each size have to be multiples; the bounds are.

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
    multiple: int = 1


@checked_keywords
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


@checked_keywords
@dataclass(frozen=True)
class Decision:
    """Outcome of one sync round: all that the engine carries out. Unpacks to the planner and the proposal.

    Args:
        planner: the planner that has seen the observations, ``None`` if the decision is not a planner's.
        proposal: plan to change to, ``None`` to keep the current one.
        density: share of the gradient to send from now on, with its predictions; ``None`` leaves it unchanged.
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
    kept: str | None = None
    soon: bool = False
    error: float | None = None
    moving: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter((self.planner, self.proposal))

    @classmethod
    def of(cls, outcome: Any, planner: "Planner | None" = None, total: int | None = None) -> "Decision":
        """Convert the result of a planner's ``decide``: a decision, or a pair of planner and proposal.

        Args:
            outcome: the result.
            planner: the planner that decided, named in errors.
            total: total batch size so far, which only a planner with ``moves_total`` may change.

        Raises:
            TypeError: if it is neither, or a part of it has the wrong type.
            ValueError: if it changes the total although the planner says that it does not.

        Example:
            >>> Decision.of((None, None)) == Decision(None)
            True
        """
        whose = f"decide() of {'a planner' if planner is None else type(planner).__name__}"
        decision = cls(*outcome) if isinstance(outcome, tuple) and len(outcome) == 2 else outcome
        if not isinstance(decision, cls):
            raise TypeError(
                f"{whose} returned {outcome!r}; return Decision(planner, proposal), or the pair of both with None for "
                "no proposal."
            )
        for name, allowed in _FIELDS.items():
            value = getattr(decision, name)
            if not isinstance(value, allowed):
                names = ("None" if one is _NONE else one.__name__.rstrip("_") for one in allowed)
                types = " or ".join(dict.fromkeys(names))
                raise TypeError(f"{whose} returned a Decision with {name}={value!r}; give {types}.")
        if decision.planner is not None:
            try:
                check_planner(decision.planner)
            except TypeError as error:
                raise TypeError(f"{whose} returned a Decision without a planner: {error}") from None
        check_proposal(decision.proposal, whose, None if planner is None or planner.moves_total else total)
        return decision


_NONE = type(None)
_FIELDS: dict[str, tuple[type, ...]] = {
    "density": (DensityChoice, _NONE),
    "kept": (str, _NONE),
    "soon": (bool, np.bool_),
    "error": (float, int, np.number, _NONE),
    "moving": (bool, np.bool_),
}
"""Types that the fields of a decision may have."""


def check_proposal(proposal: Any, whose: str, total: int | None = None) -> Proposal | None:
    """Check that a planner proposed a plan and a reason, or ``None``, and return it.

    Args:
        proposal: the proposal.
        whose: method and planner that made it, for the error.
        total: the total that the plan has to keep, ``None`` if it may change it.

    Raises:
        TypeError: if it is neither.
        ValueError: if the plan has another total.

    Example:
        >>> check_proposal(Proposal(BatchPlan(8, (6, 2)), "by speed"), "initial() of Mine", total=8).reason
        'by speed'
    """
    if proposal is None:
        return None
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{whose} proposed {proposal!r}; give Proposal(plan, reason), or None for no change.")
    if not isinstance(proposal.plan, BatchPlan) or not isinstance(proposal.reason, str):
        raise TypeError(f"{whose} proposed {proposal!r}; its plan has to be a BatchPlan, its reason a string.")
    if total is not None and proposal.plan.total_batch_size != total:
        raise ValueError(
            f"{whose} changes the total batch from {total} to {proposal.plan.total_batch_size}, and the planner's "
            "moves_total is False. Keep the total, or set moves_total = True."
        )
    return proposal


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
    if isinstance(planner, type):
        raise TypeError(f"planner={planner.__name__} is a class; give an instance, {planner.__name__}(...).")
    if isinstance(planner, Planner):
        return planner
    lacks = ", ".join(name for name in OFFERED if name not in dir(planner))
    raise TypeError(
        f"planner={planner!r} lacks {lacks}. See lightning_hetero.core.policies.base.Planner; moves_total = False says "
        "that the total batch stays."
    )


def load_planner(planner: Planner, state: dict[str, Any]) -> Planner:
    """Return the planner that ``loaded`` makes of a state.

    Raises:
        RuntimeError: if that is no planner.

    Example:
        >>> from lightning_hetero.core.policies.static import StaticPlanner
        >>> load_planner(StaticPlanner(), {})
        StaticPlanner()
    """
    loaded = planner.loaded(state)
    if not isinstance(loaded, Planner):
        raise RuntimeError(f"loaded() of {type(planner).__name__} returned {loaded!r}; return the restored planner.")
    return loaded
