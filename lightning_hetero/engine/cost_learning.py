"""Cost weights that rank 0 learns from observed steps, and that its decisions carry to all ranks."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, Proposal
from lightning_hetero.core.timing.cost.model import CostFit, fit_cost, reduced_to_plan
from lightning_hetero.data.cost.division import CostDivision

__all__ = ["CostLearning"]

Array = npt.NDArray[np.float64]

STEPS_KEPT = 256
MOST_FIXED = 4.0
"""Most fixed work that is used, relative to the worker's planned work: beyond it, what varies hardly matters."""
NOTABLE = 0.03
"""Change of the predicted times of recent shares, relative to their spread over workers, for which plans change."""


class CostLearning:
    """Cost weights learned from the observed steps, on rank 0.

    Args:
        division: division whose shares were observed.
    """

    def __init__(self, division: CostDivision) -> None:
        self.division = division
        self.fit: CostFit | None = None
        self._work: Array | None = None
        self._times: Array | None = None
        self._sizes: Array | None = None

    def observe(self, observations: StepObservations, plan: BatchPlan) -> StepObservations:
        """Learn from the observations of a sync round, and return them as if each worker had had its planned work.

        Args:
            observations: steps of all ranks.
            plan: newest plan, whose weights count until there is a fit.
        """
        if observations.num_steps and observations.work.shape[2] == self.division.features:
            self._keep(observations)
            assert self._work is not None
            assert self._times is not None
            assert self._sizes is not None
            self.fit = fit_cost(self._work, self._times, self._sizes) or self.fit
        theta = self.division.weights(plan).theta if self.fit is None else self.fit.theta
        return reduced_to_plan(observations, theta)

    def _keep(self, new: StepObservations) -> None:
        if self._work is None or self._times is None or self._sizes is None:
            self._work, self._times, self._sizes = new.work, new.compute, new.local_batch_sizes
            return
        self._work = np.concatenate([self._work, new.work])[-STEPS_KEPT:]
        self._times = np.concatenate([self._times, new.compute])[-STEPS_KEPT:]
        self._sizes = np.concatenate([self._sizes, new.local_batch_sizes])[-STEPS_KEPT:]

    def carried_by(self, decision: Decision, plan: BatchPlan) -> Decision:
        """Return the decision with the learned weights in its plan; propose them by themselves if they moved enough.

        Args:
            decision: what the planner decided.
            plan: newest plan.
        """
        learned = self._weights(plan)
        notable = learned is not None and self._differ(plan.cost, learned, plan)
        weights = learned if notable else plan.cost
        if decision.proposal is not None:
            proposed = replace(decision.proposal.plan, cost=decision.proposal.plan.cost or learned or plan.cost)
            return replace(decision, proposal=replace(decision.proposal, plan=proposed))
        if not notable or weights is None:
            return decision
        reason = f"cost of a share learned: {weights.describe()}"
        return replace(decision, proposal=Proposal(replace(plan, cost=weights), reason), kept=None)

    def _weights(self, plan: BatchPlan) -> CostWeights | None:
        if self.fit is None:
            return None
        most = [MOST_FIXED * size for size in plan.local_batch_sizes]
        return CostWeights(self.fit.theta, tuple(min(h, m) for h, m in zip(self.fit.fixed_work, most, strict=True)))

    def _differ(self, before: CostWeights | None, after: CostWeights, plan: BatchPlan) -> bool:
        """Return whether two weights give notably different times for the shares seen of late."""
        if before is None or not before.fixed:
            return True
        assert self._work is not None
        seen, sizes = self._work[-32:], np.array(plan.local_batch_sizes, dtype=float)
        times = [
            (np.array(w.fixed) + seen @ np.array(w.theta)) / np.maximum(np.array(w.fixed) + sizes, 1e-9)
            for w in (before, after)
        ]
        own = [t / t.mean() for t in times]
        return bool(np.sqrt(np.mean((own[1] - own[0]) ** 2)) > NOTABLE)
