"""The controller of dynamic batching (D sec. III-C) exactly as printed, as a planner."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal


@dataclass(frozen=True)
class AsPrinted:
    """Proportional control exactly as printed (D eq. 4-5 and the four steps that end sec. III-C).

    ``b' = b - X (mu - mean(mu))`` with ``X = b / mu``, and ``mu`` the moving average since the last change; sizes stay
    within bounds; all change if one changes by more than the dead band. As printed, nothing keeps the sum of the sizes,
    and any fall of throughput after a rise of a size bounds that size for good.

    Args:
        dead_band: share by which one size has to change.
        decay: weight of the past in the moving average, of which the paper gives none.
        start: capacities in proportion to which the first sizes are; equal sizes without.
        keeps_total: bring the sizes back to the total that was given (ours, to tell what the missing step does).
        learns_bounds: learn the upper bounds.
    """

    dead_band: float = 0.05
    decay: float = 0.9
    start: tuple[float, ...] = ()
    keeps_total: bool = False
    learns_bounds: bool = True
    mu: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    before: tuple[tuple[int, float], ...] = ()
    most: tuple[int, ...] = ()

    @property
    def moves_total(self) -> bool:
        return not self.keeps_total

    def initial(self, context: PlanContext) -> Proposal | None:
        if not self.start:
            return None
        sizes = proportional_sizes(context.total_batch_size, self.start, min_local=context.min_local)
        return Proposal(BatchPlan(context.total_batch_size, sizes), "in proportion to cores")

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        sizes = tuple(current.local_batch_sizes)
        state = self if sizes == self.sizes else replace(self, sizes=sizes, mu=())
        for times in observations.compute[(observations.local_batch_sizes == sizes).all(axis=1)]:
            old = np.asarray(state.mu or times)
            state = replace(state, mu=tuple((self.decay * old + (1 - self.decay) * times).tolist()))
        if not state.mu:
            return Decision(state)
        b, mu = np.asarray(sizes, float), np.asarray(state.mu)
        speed = b / mu
        most = np.asarray(state.most or (2**31,) * len(b))
        for i, (size, former) in enumerate(state.before if self.learns_bounds else ()):
            if b[i] > size and speed[i] < former:
                most[i] = min(most[i], size)
        wanted = np.clip(b - speed * (mu - mu.mean()), context.min_local, most)
        following = tuple(int(size) for size in np.rint(wanted))
        if self.keeps_total:
            limit = most if most.sum() >= context.total_batch_size else None
            following = proportional_sizes(
                context.total_batch_size, wanted, min_local=context.min_local, max_local=limit
            )
        state = replace(state, most=tuple(int(one) for one in most))
        if (np.abs(np.subtract(following, b)) / b).max() <= self.dead_band:
            return Decision(state)
        state = replace(state, before=tuple(zip(sizes, speed.tolist(), strict=True)))
        return Decision(state, Proposal(BatchPlan(sum(following), following), "as printed"))

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def loaded(self, state: dict[str, Any]) -> "AsPrinted":
        return self
