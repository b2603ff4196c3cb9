"""Schedule of sync rounds: as often as possible for at most 0.5 % of the training time."""

import math
import sys
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision

__all__ = ["SETTINGS", "ScheduleSettings", "SyncSchedule"]

NEVER = sys.maxsize
"""A step that no run reaches."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Limits of the steps between two sync rounds.

    Args:
        first_step: step of the first round: most of the cost of a short training is its equal sizes before it.
        first_step_density: step of the first round where a density waits for the computing time.
        min_steps: fewest steps.
        min_steps_moving: fewest steps while the speeds of workers change.
        min_steps_density: fewest steps where a density is decided on: of long steps, few tell what the link does, and
            the first one after a round is not timed.
        max_steps: most steps.
        max_time_share: share of the time that rounds may take.
        late_factor: factor of the planned time to the next round after which it is late.

    Example:
        >>> ScheduleSettings().max_time_share
        0.005
    """

    first_step: int = 6
    first_step_density: int = 2
    min_steps: int = 8
    min_steps_moving: int = 4
    min_steps_density: int = 2
    max_steps: int = 1000
    max_time_share: float = 0.005
    late_factor: float = 2.0


SETTINGS = ScheduleSettings()


@dataclass
class SyncSchedule:
    """Counter of synchronized steps, equal on all ranks, up to the next sync round.

    Args:
        replan: ``"auto"``, ``"epoch"``, or a number of steps.

    Example:
        >>> schedule = SyncSchedule("auto")
        >>> schedule.due(5), schedule.due(6)
        (False, True)
    """

    replan: str | int
    next: int = 0
    last: int = 0
    begun: int = 0
    cost: float = math.inf
    seconds: float = math.inf

    def __post_init__(self) -> None:
        first = NEVER if self.replan == "epoch" else SETTINGS.first_step
        self.next = self.replan if isinstance(self.replan, int) else first

    def due(self, step: int) -> bool:
        """Return whether a sync round follows this step."""
        return step >= self.next

    def hasten(self, step: int) -> None:
        """Let the next round come at this step at the latest; all ranks have to do so together.

        Example:
            >>> schedule = SyncSchedule("epoch")
            >>> schedule.hasten(3)
            >>> schedule.due(2), schedule.due(3)
            (False, True)
        """
        self.next = min(self.next, step)

    def begin_early(self, step: int) -> None:
        """Let the first round, if its step is not the user's choice, come two steps after this one, for a density."""
        if self.replan == "auto":
            self.hasten(step + SETTINGS.first_step_density)

    def late(self, seconds: float) -> bool:
        """Return whether so many seconds after a round the next one is late, because steps have become longer.

        Only rank 0 knows, which has planned the round.
        """
        return seconds > SETTINGS.late_factor * self.seconds

    def due_at_epoch(self, step: int, *, micro_batches_move: bool = False) -> bool:
        """Return whether enough steps have passed since the last sync round for one between two epochs.

        If the number of micro-batches may change, the steps since the last round *between epochs* count, because that
        number changes only between epochs, however many rounds there are within one.
        """
        return self.replan == "epoch" or step - (self.begun if micro_batches_move else self.last) >= SETTINGS.min_steps

    def after(
        self, step: int, observations: StepObservations, cost: float, decision: Decision, *, ahead: int = 0
    ) -> int:
        """Return the step of the next sync round; with ``"auto"``, the first that keeps them at 0.5 % of the time.

        It comes after 8 to 1000 steps, or after 4 at the earliest while speeds change, since a plan knows nothing newer
        than the round it is based on, or after 2 where the density of messages is decided on. A change of plan adds one
        step, because its first step is not observed. A decision that waits for the next steps' timings waits for eight
        of them at most, whatever that costs.

        The lower cost of the last two rounds counts, so one round on a stalled link does not delay the next ones.

        Args:
            step: this round's step.
            observations: what it gathered.
            cost: seconds that it took.
            decision: its decision.
            ahead: steps that still run under the old plan, because their batches were already drawn.
        """
        if self.replan == "epoch":
            return NEVER
        if isinstance(self.replan, int):
            return step + self.replan
        cost, self.cost = min(cost, self.cost), cost
        changed = decision.proposal is not None
        times = observations.step_time[np.isfinite(observations.step_time)]
        limits, least = SETTINGS, SETTINGS.min_steps
        if decision.density is not None:
            least = limits.min_steps_density
        elif decision.moving:
            least = limits.min_steps_moving
        usual = max(float(np.median(times)), 1e-6) if times.size else math.inf
        steps = math.ceil(cost / limits.max_time_share / usual)
        most = limits.min_steps + ahead * changed if decision.soon else limits.max_steps
        steps = min(max(steps, least), most) + changed
        if step < limits.first_step:  # the first split does not wait for longer because a density did not wait
            steps = min(steps, limits.first_step - step)
        self.seconds = steps * usual
        return step + steps

    def done(self, step: int, following: int, *, between_epochs: bool = False) -> None:
        """End a sync round; all ranks take the step of the following one from rank 0."""
        self.last, self.next, self.begun = step, following, step if between_epochs else self.begun
