"""When ranks look at their plan: often while that is cheap, at a share of the time that nobody notices."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision

__all__ = ["SyncSchedule"]

FIRST = 8
WALKING = 4
BUDGET = 0.005
LONGEST = 1000
NEVER = 2**62


@dataclass
class SyncSchedule:
    """Counts synchronised steps, which all ranks count alike, to the next exchange.

    Args:
        replan: ``"auto"``, ``"epoch"``, or a number of steps.

    Example:
        >>> schedule = SyncSchedule("auto")
        >>> schedule.due(7), schedule.due(8)
        (False, True)
    """

    replan: str | int
    next: int = 0
    last: int = 0
    begun: int = 0
    cost: float = math.inf

    def __post_init__(self) -> None:
        self.next = self.replan if isinstance(self.replan, int) else NEVER if self.replan == "epoch" else FIRST

    def due(self, step: int) -> bool:
        """Whether ranks exchange after this step."""
        return step >= self.next

    def due_at_epoch(self, step: int, *, micro_batches_move: bool = False) -> bool:
        """Whether enough steps have passed since the last exchange for one between two epochs.

        Where the number of micro-batches may move, those since the last one between two epochs count: it changes only
        there, however often ranks exchange within an epoch.
        """
        return self.replan == "epoch" or step - (self.begun if micro_batches_move else self.last) >= FIRST

    def after(
        self, step: int, observations: StepObservations, cost: float, decision: Decision, *, ahead: int = 0
    ) -> int:
        """Step of the next exchange: in ``"auto"``, as soon as exchanges cost 0.5 % of the time at most.

        That is after eight steps at the earliest, and after four where speeds walk: a plan is as late as the look that
        it is based on; after a thousand at the latest. One step more follows a change, since its first one is not
        observed. A decision that waits for what the next steps show waits for eight of them at most, whatever that
        costs.

        The lower cost of the last two counts: a link that stalls in one exchange does not put off the next ones.

        Args:
            step: this exchange's step.
            observations: what it gathered.
            cost: seconds that it took.
            decision: what was decided.
            ahead: steps that still run as before, since their batches were drawn already.
        """
        if self.replan == "epoch":
            return NEVER
        if isinstance(self.replan, int):
            return step + self.replan
        cost, self.cost = min(cost, self.cost), cost
        changed = decision.proposal is not None
        times = observations.step_time[np.isfinite(observations.step_time)]
        steps = math.ceil(cost / BUDGET / max(float(np.median(times)), 1e-6)) if times.size else FIRST
        steps = max(steps, WALKING if decision.moving else FIRST)
        return step + min(steps, FIRST + ahead * changed if decision.soon else LONGEST) + changed

    def done(self, step: int, following: int, *, between_epochs: bool = False) -> None:
        """An exchange took place; all ranks take the following one from rank 0."""
        self.last, self.next, self.begun = step, following, step if between_epochs else self.begun
