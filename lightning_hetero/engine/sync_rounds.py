"""Sync rounds: ranks gather their measurements, rank 0 decides, all adopt its plan from the same step on."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.comm.agreement.sync_round import SyncPayload, gather_payloads
from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.comm.link.diagnosis import LinkDiagnosis
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.core.batching.plan import PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision
from lightning_hetero.data.step_share import StepShare
from lightning_hetero.engine.training_data import TrainingData
from lightning_hetero.engine.watch.watch import RunWatch

__all__ = ["NOT_PREDICTED", "Decide", "Predicted", "SyncRounds"]

Predicted = tuple[float | None, float | None, float]
"""Predicted seconds of a step, their standard error, and the predicted seconds of a step of equal sizes."""
Decide = Callable[[StepObservations], tuple[Decision, Predicted]]
"""Function from observations to a decision and what is predicted."""
MOST_STEPS = 256
"""Newest steps since a round over which samples are averaged."""
NOT_PREDICTED: Predicted = (None, None, math.nan)


class SyncRounds:
    """Sync rounds of a run, in which ranks agree on plans.

    Args:
        control: control plane of the ranks.
        data: training data whose plans are agreed on.
        timer: timer of this rank's steps.
        diagnosis: warns of a link that makes steps wait.
        watch: names stragglers, measures gains, and records the run.

    Attributes:
        schedule: when rounds are due.
        observations: measurements of all ranks from the newest round that had any.
        accumulation: micro-batches of an optimizer step, all under the same plan.
        keeps_window: whether the training loop itself sets that number.
    """

    def __init__(
        self,
        control: ControlPlane,
        data: TrainingData,
        timer: StepTimer,
        diagnosis: LinkDiagnosis,
        watch: RunWatch,
    ) -> None:
        self.control, self.data, self.timer, self.diagnosis, self.watch = control, data, timer, diagnosis, watch
        self.schedule = SyncSchedule(data.config.replan)
        self.observations = StepObservations.empty(control.world_size)
        self.accumulation, self.keeps_window, self._ended = 1, False, time.perf_counter()
        self._ran: deque[tuple[tuple[int, int], tuple[int, ...]]] = deque(maxlen=MOST_STEPS)

    def begin_step(self, at: tuple[int, int], share: StepShare) -> None:
        """Note the samples of each worker in a full step, which all ranks know without a message."""
        if share.regular and share.sizes:
            self._ran.append((at, share.sizes))

    def accumulate(self, number: int) -> None:
        """Use ``number`` micro-batches per optimizer step from now on."""
        self.accumulation = number

    def keep_window(self, keeps: bool = True) -> None:
        """Leave the number of micro-batches to the training loop, or take it back."""
        self.keeps_window = keeps

    def hasten(self) -> None:
        """Let a round follow the next optimizer step, whenever it was due; on all ranks at the same batch."""
        self.schedule.hasten(self.timer.synced_steps + 1)

    @property
    def late(self) -> bool:
        """``True`` on rank 0 if steps have become so long that the next round should not wait for all of them."""
        return self.schedule.late(time.perf_counter() - self._ended)

    @property
    def elapsed(self) -> int:
        """Steps since the last round."""
        return self.timer.synced_steps - self.schedule.last

    def run(
        self, decide: Decide, at: tuple[int, int], not_before: tuple[int, int], payloads: Sequence[SyncPayload]
    ) -> Any:
        """Gather payloads, decide on rank 0, adopt a new plan; collective.

        Args:
            decide: decision, called on rank 0.
            at: epoch and step of the running batch.
            not_before: earliest position of a new plan.
            payloads: what ranks exchange besides their step times.

        Returns:
            Outcome of the round, and the choice of a density, the same on all ranks.
        """
        data, plans, begin = self.data, self.data.plans, time.perf_counter()
        if plans.history is None or data.sampler is None or data.workers is None:
            raise RuntimeError("no training data was sharded yet; call shard() first.")
        held = plans.history.digest(), *data.sampler.drawn
        reached = gather_payloads(self.control, held, (self.timer, self.watch.memory, data, *payloads))
        observations, workers, done, learning = self.timer.matched, data.workers, Decision(None), data.cost_learning
        self.observations = observations if observations.num_steps else self.observations

        def decision() -> Any:
            nonlocal done
            epoch, step = max(not_before, *reached)
            start = epoch, -(-step // self.accumulation) * self.accumulation  # a window has one plan
            assert plans.history is not None
            newest = plans.history.last.plan
            planned = observations if learning is None else learning.observe(observations, newest)
            (done, predicted), entry = decide(planned), None
            done = done if learning is None else learning.carried_by(done, newest)
            if done.proposal is not None:
                workers.check_user_split(done.proposal.plan)
                entry = PlanEntry(*start, done.proposal.plan, done.proposal.reason)
            cost, step = time.perf_counter() - begin, self.timer.synced_steps
            ahead = start[1] - (at[1] + 1 if start[0] == at[0] else 0)
            following = self.schedule.after(step, observations, cost, done, ahead=ahead // self.accumulation)
            return entry, predicted, following, done.density

        entry, (predicted, error, even), following, density = self.control.decide(decision)
        if entry is not None:
            plans.append(entry)
        self.control.require_equal("the plan and the step of the next sync round", (plans.history.digest(), following))
        rows = self._rows_that_ran(at)
        plans.note_rows(at, rows)
        self._ran.clear()
        plans.drop_before(at[0])
        self.schedule.done(self.timer.synced_steps, following, between_epochs=not_before[1] == 0)
        plans.sayings.note_kept(done)
        self._ended = time.perf_counter()
        moved = done.density is not None
        return RoundResult(done.planner, observations, entry, predicted, error, moved, even, done.kept, rows), density

    def _rows_that_ran(self, at: tuple[int, int]) -> tuple[float, ...]:
        """Return the samples of each worker in a full step of the running plan since the last round, on average."""
        assert self.data.plans.history is not None
        entry = self.data.plans.history.at(*at)
        first = max((entry.epoch, entry.step), (at[0], 0))
        sizes = [sizes for begun, sizes in self._ran if begun >= first]
        return tuple(map(float, np.mean(sizes or [entry.plan.local_batch_sizes], axis=0)))
