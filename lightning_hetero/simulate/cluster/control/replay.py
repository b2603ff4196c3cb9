"""Replay of a run's sync rounds: on the observations of the run, the simulator has to decide as the run did."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal, load_planner
from lightning_hetero.simulate.cluster.control.rounds import VirtualRounds
from lightning_hetero.simulate.cluster.link_profile import LinkProfile
from lightning_hetero.simulate.cluster.result import Recorder
from lightning_hetero.simulate.cluster.truth.state import ClusterState
from lightning_hetero.simulate.devices.device_profile import DeviceProfile

__all__ = ["RecordedRound", "RecordingPlanner", "replay"]


@dataclass(frozen=True)
class RecordedRound:
    """Sync round as a planner saw it.

    Args:
        observations: measurements of all workers.
        current: plan of the next steps.
        context: conditions of that plan.
        decision: what the planner decided.
    """

    observations: StepObservations
    current: BatchPlan
    context: PlanContext
    decision: Decision


class RecordingPlanner:
    """Planner that decides as another one and keeps a list of all rounds, for a run or a simulation.

    Args:
        planner: the one that decides.
        log: list to which rounds are added; by default a new one.

    Example:
        >>> from lightning_hetero.simulate import ClusterSimulator
        >>> from lightning_hetero.core.planning.planner import PerfModelPlanner
        >>> recording = RecordingPlanner(PerfModelPlanner())
        >>> devices = [DeviceProfile(0.001, 0, 0.002, 0), DeviceProfile(0.003, 0, 0.006, 0)]
        >>> plans = ClusterSimulator(devices, 40, policy=recording).run(30).plans
        >>> [entry.plan == again.plan for entry, again in zip(plans, replay(recording.log, PerfModelPlanner()))]
        [True, True, True]
    """

    def __init__(self, planner: Planner, log: list[RecordedRound] | None = None) -> None:
        self.planner: Planner = planner
        self.log: list[RecordedRound] = [] if log is None else log

    @property
    def moves_total(self) -> bool:
        """True if the planner changes the total."""
        return self.planner.moves_total

    def initial(self, context: PlanContext) -> Proposal | None:
        """Return the planner's plan before any step."""
        return self.planner.initial(context)

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Decide as the planner does, and note the round."""
        decision = Decision.of(self.planner.decide(observations, current, context), self.planner)
        self.log.append(RecordedRound(observations, current, context, decision))
        following = None if decision.planner is None else RecordingPlanner(decision.planner, self.log)
        return replace(decision, planner=following)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict as the planner does."""
        return self.planner.predict(plan, context)

    def state_dict(self) -> dict[str, Any]:
        """Return the planner's state."""
        return self.planner.state_dict()

    def loaded(self, state: dict[str, Any]) -> "RecordingPlanner":
        """Return the restored planner, with the same list."""
        return RecordingPlanner(load_planner(self.planner, state), self.log)


class _RecordedTimer:
    """Timer that reports the observations of a run."""

    def __init__(self, log: Sequence[RecordedRound]) -> None:
        self._left = list(log)

    @property
    def change_cost(self) -> float | None:
        """Cost of a change as the run knew it in the next round."""
        return self._left[0].context.change_cost if self._left else None

    def see(self, times: Any) -> None:
        """Ignore simulated steps."""

    def take(self) -> StepObservations:
        """Return the observations of the next round."""
        return self._left[0].observations

    def passed(self) -> None:
        """Go on to the next round."""
        self._left.pop(0)


def replay(log: Sequence[RecordedRound], planner: Planner | None) -> tuple[PlanEntry, ...]:
    """Return the plans that the simulator adopts on the observations of a run that did not change its workers.

    Args:
        log: sync rounds of the run, from its beginning.
        planner: planner with which the run began.

    Raises:
        ValueError: if the simulator would decide under another plan, or under other conditions, than the run did.
    """
    if not log:
        return ()
    first, record = log[0].context, Recorder()
    bounds = first.max_local or (NO_LIMIT,) * len(first.identities)
    devices = tuple(DeviceProfile(0.0, 0.0, 0.0, 0.0, memory=None if b == NO_LIMIT else b) for b in bounds)
    cluster = ClusterState(devices, first.identities, LinkProfile(), first.min_local[0], first.capacities)
    timer, step = _RecordedTimer(log), 0
    rounds = VirtualRounds(planner, record, replan="auto", hysteresis=first.hysteresis, round_seconds=0.0, timer=timer)
    rounds.begin(cluster, first.total_batch_size)
    for number, seen in enumerate(log):
        step += seen.context.elapsed or 0
        plan = rounds.newest
        mine = rounds.context(cluster, step, plan, noise=seen.context.noise, epoch_begins=seen.context.epoch_begins)
        if (plan.local_batch_sizes, mine) != (seen.current.local_batch_sizes, seen.context):
            raise ValueError(
                f"round {number} of the run decided on {seen.current.local_batch_sizes} under {seen.context}; the "
                f"simulator comes to {plan.local_batch_sizes} under {mine}."
            )
        rounds.run(step, cluster, noise=seen.context.noise, epoch_begins=seen.context.epoch_begins)
        timer.passed()
    return record.result().plans
