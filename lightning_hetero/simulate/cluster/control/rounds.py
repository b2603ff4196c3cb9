"""Sync rounds of a simulation: what the timers saw goes to the planner, and its plan holds as it would in a run."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.policies.base import PlanContext, Planner, load_planner
from lightning_hetero.core.policies.round_decision import decide_round
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner
from lightning_hetero.core.validation import check_number
from lightning_hetero.simulate.cluster.control.noise_trajectory import NoiseTrajectory
from lightning_hetero.simulate.cluster.control.virtual_timer import StepMeasurements, VirtualTimer
from lightning_hetero.simulate.cluster.result import Recorder, RoundRecord
from lightning_hetero.simulate.cluster.truth.messages import MessageExchange
from lightning_hetero.simulate.cluster.truth.state import ClusterState
from lightning_hetero.simulate.cluster.truth.step_events import StepTimes

__all__ = ["VirtualRounds", "typical_round_seconds"]


def typical_round_seconds(workers: int) -> float:
    """Return the seconds of a sync round up to its decision by the time model: a fixed part, and one per worker.

    Measured by ``benchmarks/scaling.py`` on two shared cores.

    Example:
        >>> typical_round_seconds(16) < 0.01 < typical_round_seconds(1000)
        True
    """
    return 4.5e-3 + 6e-5 * workers


class VirtualRounds:
    """Sync rounds on the virtual clock.

    Args:
        planner: decides, ``None`` to keep equal sizes.
        record: takes note of plans and rounds.
        replan: interval of the rounds.
        hysteresis: least predicted gain for which a plan changes.
        change_cost: seconds of a change, ``None`` for what the first worker measures.
        round_seconds: seconds of a round, or a function of the processor time of its decision.
        ahead: steps that still run under the old plan after a decision.
        noise: gradient noise, ``None`` if it is not measured.
        seed: of the errors of its measurement.
        timer: reports measurements in place of a :class:`VirtualTimer`.

    Attributes:
        planner: planner that has seen all rounds so far.
        timer: timers of all workers.
        schedule: when rounds are due.
    """

    def __init__(
        self,
        planner: Planner | None,
        record: Recorder,
        *,
        replan: str | int,
        hysteresis: float | None = None,
        change_cost: float | None = None,
        round_seconds: float | Callable[[float], float] | None = None,
        ahead: int = 0,
        noise: NoiseTrajectory | None = None,
        seed: int = 0,
        timer: StepMeasurements | None = None,
    ) -> None:
        if round_seconds is not None and not callable(round_seconds):
            check_number("round_seconds", round_seconds, low=0.0)
        self._config = HeteroConfig(replan=replan, hysteresis=hysteresis, change_cost=change_cost)
        self.planner, self._record, self._seconds, self._ahead = planner, record, round_seconds, ahead
        self.schedule, self._given = SyncSchedule(replan), timer
        self.timer: StepMeasurements = VirtualTimer(1) if timer is None else timer
        self._history: PlanHistory | None = None
        self._noise, self._samples = noise, 0
        self._watches, self._since = False, 0.0  # whether long steps hasten a round; seconds since the last one
        if noise is not None:
            noise.begin(seed)

    def begin_sending(self, messages: MessageExchange) -> None:
        """Begin a run whose planner decides on the density of messages, as its callback does."""
        if isinstance(self.planner, TimeToAccuracyPlanner):
            self.planner, self._watches = self.planner.begin(messages.see()), True
            messages.density = self.planner.density or messages.density
            assert isinstance(self.timer, VirtualTimer)
            self.timer.shorten_warm_up()
            self.schedule.begin_early(0)

    def begin(self, cluster: ClusterState, total: int, step: int = 0) -> None:
        """Begin a run, or go on with other workers as one that was started anew from its checkpoint."""
        self.timer = VirtualTimer(cluster.size, SETTINGS.of(cluster.size)) if self._given is None else self._given
        self.schedule = SyncSchedule(self._config.replan)
        self.schedule.done(step, self.schedule.next + step)
        proposal = cluster.workers.initial_plan(self._config, total, self.planner, None)
        if proposal is not None:
            self._append(PlanEntry(0, step, proposal.plan, proposal.reason))

    def restart(self, cluster: ClusterState, step: int) -> None:
        """Go on with other workers, with what a checkpoint keeps."""
        assert self._history is not None
        if self.planner is not None:
            self.planner = load_planner(self.planner, self.planner.state_dict())
        total, self._history = self._history.at(0, step).plan.total_batch_size, None
        self.begin(cluster, total, step)

    def _append(self, entry: PlanEntry) -> None:
        kept = () if self._history is None else self._history.entries[-1 - self._ahead :]
        self._history = PlanHistory(kept).extended(entry) if kept else PlanHistory((entry,))
        self._record.add(entry)

    # plans

    def plan_at(self, step: int) -> BatchPlan:
        """Return the plan of a step."""
        assert self._history is not None
        return self._history.at(0, step).plan

    @property
    def newest(self) -> BatchPlan:
        """The newest plan, which may hold only from a later step on."""
        assert self._history is not None
        return self._history.last.plan

    def stretch_ends(self, step: int) -> int:
        """Return the step before which the plan stays and no round is due."""
        assert self._history is not None
        if self._watches:
            return step + 1
        starts = [entry.step for entry in self._history.entries if entry.step > step]
        return min([max(self.schedule.next, step + 1), *starts])

    def adopt(self, plan: BatchPlan, reason: str, step: int, cluster: ClusterState) -> PlanEntry:
        """Adopt a plan from a step on."""
        cluster.workers.check_user_split(plan)
        assert self._history is not None
        entry = PlanEntry(0, max(step, self._history.last.step), plan, reason)
        self._append(entry)
        return entry

    # rounds

    def see(self, times: StepTimes) -> None:
        """Measure some steps."""
        self.timer.see(times)
        total, steps = int(times.planned.sum()), len(times.a)
        self._since += float(times.seconds.sum())
        if self._noise is not None:
            self._noise.see(total, steps, self._samples)
        self._samples += total * steps

    def due(self, step: int) -> bool:
        """Return whether a round follows after so many steps."""
        if self._watches and self.schedule.late(self._since):
            self.schedule.hasten(step + 2)  # ranks tell each other of it before the next batch
        return self.schedule.due(step)

    def context(
        self, cluster: ClusterState, step: int, plan: BatchPlan, *, unseen: int = 0, **known: Any
    ) -> PlanContext:
        """Return the conditions of a plan after so many steps, and others since the last round that were unseen."""
        known |= {"change_cost": self.timer.change_cost, "elapsed": step - self.schedule.last + unseen}
        return cluster.workers.context(self._config, plan.total_batch_size, **known)

    def run(self, step: int, cluster: ClusterState, messages: MessageExchange | None = None, **known: Any) -> float:
        """Run a sync round after so many steps; return its seconds."""
        assert self._history is not None
        observations, running, upcoming = self.timer.take(), self.plan_at(step - 1), self._history.last.plan
        if self._noise is not None:
            known["noise"] = self._noise.estimate()
        if messages is not None:
            known["link"] = messages.see()
        context = partial(self.context, cluster, step, upcoming, **known)
        begin = time.process_time()
        decision, (predicted, error) = decide_round(self.planner, observations, running, upcoming, context)
        taken = time.process_time() - begin
        if decision.proposal is not None:
            self.adopt(decision.proposal.plan, decision.proposal.reason, step + self._ahead, cluster)
        seconds = self._round_seconds(taken, cluster.size)
        following = self.schedule.after(step, observations, seconds, decision, ahead=self._ahead)
        self.schedule.done(step, following)
        self.planner, self._since = decision.planner, 0.0
        if messages is not None:
            messages.apply(decision.density)
        self._record.add(RoundRecord(step, predicted, error, decision.kept, following, seconds, taken))
        return seconds

    def _round_seconds(self, taken: float, workers: int) -> float:
        if callable(self._seconds):
            return check_number("round_seconds(...)", self._seconds(taken), low=0.0)
        return typical_round_seconds(workers) if self._seconds is None else self._seconds
