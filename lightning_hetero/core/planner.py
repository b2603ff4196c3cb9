"""Policies: from observations to the next plan, as pure values.

A planner is replaced, never changed in place: ``decide(observations, current, context) -> (planner, proposal)``. It
can be replayed, checkpointed and tested with no process and no clock. The table :data:`PLANNERS` lists all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from lightning_hetero.core.arrivals import arrival_differences, own_arrivals
from lightning_hetero.core.bandwidth import MessageLink
from lightning_hetero.core.noise_scale import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.optperf import solve_optperf, static_sizes
from lightning_hetero.core.pace import pace
from lightning_hetero.core.pid import ControllerState, control, smooth
from lightning_hetero.core.plan import BatchPlan
from lightning_hetero.core.profile import NodeProfile
from lightning_hetero.core.time_model import (
    ClusterTimeModel,
    estimate_gamma,
    estimate_sync_times,
)
from lightning_hetero.core.unexplained import Unexplained

__all__ = [
    "PLANNERS",
    "PerfModelPlanner",
    "PlanContext",
    "Planner",
    "Proposal",
    "ProportionalPlanner",
    "StaticPlanner",
]


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
        capacities: open-loop capacity of each rank (cores or peak FLOPs).
        noise: gradient noise so far, ``None`` if nobody measures it.
        epoch_begins: whether the next plan begins with an epoch, so that ``accumulation`` may change with it.
        link: what compressed gradients cross, ``None`` if there are none.

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


@dataclass(frozen=True)
class PerfModelPlanner:
    """Learn a time model of each worker and take its exact optimum (Cannikin, sec. 3-4).

    While a worker was seen at one size only its model goes through the origin, which makes the optimum the split of
    eq. 8; the second size gives the line. A plan is changed only for a predicted gain above the hysteresis and above
    the standard error of what is known, so that scatter alone does not split equal workers.

    Args:
        profiles: what is known of each piece of hardware.
        gamma: share of the backward pass before the first bucket.
        sync_times: ``(t_o, t_u)`` in seconds, ``None`` before the first observation.
        unexplained: what steps take longer than eq. 7 says; the same share and seconds for every split.
        arrivals: seconds of averaging by which each piece of hardware differs from others when it comes last, where it
            did. What exceeds the least of them is that worker's own, and counts into its constant time.

    Example:
        >>> context = PlanContext(40, ("a", "b"), (1, 1))
        >>> sizes = np.full((5, 2), 20.0)
        >>> zeros = np.zeros_like(sizes)
        >>> obs = StepObservations(sizes, zeros, sizes * [0.001, 0.003], zeros, zeros, zeros, zeros)
        >>> planner, proposal = PerfModelPlanner().decide(obs, BatchPlan(40, (20, 20)), context)
        >>> proposal.plan.local_batch_sizes
        (30, 10)
    """

    profiles: Mapping[str, NodeProfile] = field(default_factory=dict)
    gamma: float = 1.0
    sync_times: tuple[float, float] | None = None
    unexplained: Unexplained = Unexplained()
    arrivals: Mapping[str, float] = field(default_factory=dict)

    def cluster(self, context: PlanContext) -> ClusterTimeModel | None:
        """Time model of the ranks at hand, ``None`` if one of them is unknown."""
        if self.sync_times is None or any(identity not in self.profiles for identity in context.identities):
            return None
        models = {identity: self.profiles[identity].model() for identity in context.identities}
        t_o, t_u = self.sync_times
        nodes = tuple(
            replace(models[identity], s=models[identity].s + own)
            for identity, own in zip(context.identities, self._own_arrivals(context), strict=True)
        )
        cluster = ClusterTimeModel(nodes, self.gamma, t_o, t_u).accumulated(context.accumulation)
        return cluster.slowed(*self.unexplained.line)

    def _own_arrivals(self, context: PlanContext) -> list[float]:
        """Each worker's own seconds of averaging, above the least of all workers at hand."""
        known = [self.arrivals.get(identity) for identity in context.identities]
        least = min((seconds for seconds in known if seconds is not None), default=0.0)
        return [0.0 if seconds is None else seconds - least for seconds in known]

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predicted seconds of a step (of a window, under accumulation) by Cannikin, eq. 7."""
        cluster = self.cluster(context)
        return None if cluster is None else cluster.step_time(plan.local_batch_sizes)

    def initial(self, context: PlanContext) -> Proposal | None:
        """Optimum of what an earlier run learned of this hardware; equal sizes if a rank is new."""
        cluster = self.cluster(context)
        if cluster is None:
            return None
        return Proposal(_optimum(cluster, context), "from the time models of an earlier run")

    def observe(self, observations: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """The planner that has seen the observations."""
        if observations.num_steps == 0:
            return self
        profiles = dict(self.profiles)
        for rank, identity in enumerate(context.identities):
            profile = profiles.get(identity, NodeProfile()).settled()
            sizes = observations.local_batch_sizes[:, rank]
            drifted = False
            for size in dict.fromkeys(sizes.tolist()):
                rows = sizes == size
                profile = profile.observe(
                    int(size), observations.outside_backward[rows, rank], observations.backward[rows, rank]
                )
                drifted |= profile.drifted
            profiles[identity] = replace(profile, drifted=drifted)
        gamma = estimate_gamma(observations.first_bucket, observations.backward)
        arrivals = self._arrivals(observations, context)
        own = replace(self, arrivals=arrivals)._own_arrivals(context)
        t_o, t_u = estimate_sync_times(observations.overlapped_sync, np.maximum(observations.last_sync - own, 0.0))
        if self.sync_times is not None:
            gamma = _blend(self.gamma, gamma)
            t_o, t_u = _blend(self.sync_times[0], t_o), _blend(self.sync_times[1], t_u)
        planner = PerfModelPlanner(profiles, gamma, (t_o, t_u), arrivals=arrivals)
        return replace(planner, unexplained=planner._compare(observations, context, self.unexplained))

    def _arrivals(self, observations: StepObservations, context: PlanContext) -> dict[str, float]:
        """What is known of each worker's own part of averaging, with the newest differences between workers."""
        names = context.identities
        known = {rank: self.arrivals[name] for rank, name in enumerate(names) if name in self.arrivals}
        found = own_arrivals(known, arrival_differences(observations.last_sync))
        return {**self.arrivals, **{names[rank]: seconds for rank, seconds in found.items()}}

    def _compare(self, observations: StepObservations, context: PlanContext, unexplained: Unexplained) -> Unexplained:
        """What is unexplained so far, with what the observed steps took; ``self`` predicts by eq. 7 alone."""
        cluster = self.cluster(context)
        rows = np.isfinite(observations.step_time[:, 0])
        if cluster is None or not rows.any():
            return unexplained
        predicted = np.array([cluster.step_time(sizes) for sizes in observations.local_batch_sizes[rows]])
        return unexplained.observe(predicted.mean(), pace(observations.step_time[rows].max(axis=1)))

    def decide(
        self, observations: StepObservations, current: BatchPlan, context: PlanContext
    ) -> tuple["PerfModelPlanner", Proposal | None]:
        """Learn from the observations; propose the optimum if it gains enough over the current plan."""
        planner = self.observe(observations, context)
        cluster = planner.cluster(context)
        if cluster is None:
            return planner, None
        plan = _optimum(cluster, context)
        now = _step_time(cluster, current, context)
        gain = 1.0 - (plan.step_time or now) / now
        known = [planner.profiles[identity] for identity in context.identities]
        errors = [p.standard_error(b) for p, b in zip(known, current.local_batch_sizes, strict=True)]
        if gain < max(context.hysteresis, *errors) or plan.local_batch_sizes == current.local_batch_sizes:
            return planner, None
        if any(profile.drifted for profile in known):
            drifted = [rank for rank, profile in enumerate(known) if profile.drifted]
            why = f"speed of rank {', '.join(map(str, drifted))} changed"
        elif any(len(profile.sizes) < 2 for profile in known):
            why = "first split, in proportion to measured speed"
        else:
            why = "optimum of the time model"
        return planner, Proposal(
            plan, f"{why}: step {now * 1e3:.1f} -> {(plan.step_time or now) * 1e3:.1f} ms ({gain:.0%} less)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Profiles by hardware identity, and the cluster's own coefficients."""
        return {
            "profiles": {identity: profile.state_dict() for identity, profile in self.profiles.items()},
            "gamma": float(self.gamma),
            "sync_times": None if self.sync_times is None else [float(t) for t in self.sync_times],
            "unexplained": [list(window) for window in self.unexplained.windows],
            "arrivals": {identity: float(seconds) for identity, seconds in self.arrivals.items()},
        }

    def loaded(self, state: dict[str, Any]) -> "PerfModelPlanner":
        """The planner with what :meth:`state_dict` described."""
        sync = state["sync_times"]
        return PerfModelPlanner(
            {identity: NodeProfile.from_state_dict(points) for identity, points in state["profiles"].items()},
            float(state["gamma"]),
            None if sync is None else (float(sync[0]), float(sync[1])),
            Unexplained(tuple((float(x), float(y)) for x, y in state.get("unexplained", ()))),
            {identity: float(seconds) for identity, seconds in state.get("arrivals", {}).items()},
        )


def _blend(old: float, new: float, share: float = 0.3) -> float:
    return old + share * (new - old)


def _optimum(cluster: ClusterTimeModel, context: PlanContext) -> BatchPlan:
    return solve_optperf(cluster, context.total_batch_size, min_local=context.min_local, max_local=context.max_local)


def _step_time(cluster: ClusterTimeModel, current: BatchPlan, context: PlanContext) -> float:
    """Predicted time under the current split, scaled to the total of the next steps if that is another one."""
    scale = context.total_batch_size / current.total_batch_size
    return max(cluster.step_time(np.asarray(current.local_batch_sizes) * scale), 1e-12)


FEWEST_STEPS = 5
"""Steps at the current sizes behind a decision of the controller; with fewer it waits for the next exchange."""


@dataclass(frozen=True)
class ProportionalPlanner:
    """Equalise compute times with no model (dynamic batching, sec. III-C), see :mod:`lightning_hetero.core.pid`.

    Args:
        dead_band: sizes change only if one of them would by more than this share.
        decay: weight of the past in the moving average of compute times.
        state: controller state, ``None`` before the first observation.
        throughput: samples per second last seen of each piece of hardware.

    Example:
        >>> known = ProportionalPlanner(throughput={"a": 300.0, "b": 100.0})
        >>> known.initial(PlanContext(40, ("a", "b"), (1, 1))).plan.local_batch_sizes
        (30, 10)
    """

    dead_band: float = 0.05
    decay: float = 0.9
    state: ControllerState | None = None
    throughput: Mapping[str, float] = field(default_factory=dict)

    def initial(self, context: PlanContext) -> Proposal | None:
        """Sizes in proportion to the throughput seen in an earlier run; equal sizes if a rank is new."""
        if any(identity not in self.throughput for identity in context.identities):
            return None
        sizes = static_sizes(
            context.total_batch_size,
            [self.throughput[identity] for identity in context.identities],
            min_local=context.min_local,
            max_local=context.max_local,
        )
        return Proposal(BatchPlan(context.total_batch_size, sizes), "from the throughput of an earlier run")

    def decide(
        self, observations: StepObservations, current: BatchPlan, context: PlanContext
    ) -> tuple["ProportionalPlanner", Proposal | None]:
        """Smooth the compute times of the steps at the current sizes, then one decision of the controller."""
        state = self.state
        if state is None or state.local_batch_sizes != current.local_batch_sizes:
            state = ControllerState(current.local_batch_sizes)
        expected = np.maximum(np.asarray(current.local_batch_sizes), np.asarray(context.min_local))
        rows = (observations.local_batch_sizes == expected).all(axis=1)
        for times in observations.compute[rows]:
            state = smooth(state, times, decay=self.decay)
        if state.count < FEWEST_STEPS:
            return replace(self, state=state), None
        mu = np.asarray(state.smoothed)
        speeds = {**self.throughput, **dict(zip(context.identities, state.throughput, strict=True))}
        state, sizes = control(
            state,
            context.total_batch_size,
            min_local=context.min_local,
            max_local=context.max_local,
            dead_band=self.dead_band,
        )
        planner = replace(self, state=state, throughput=speeds)
        if sizes is None:
            return planner, None
        reason = f"compute times {mu.min() * 1e3:.1f} to {mu.max() * 1e3:.1f} ms differ: equalised in proportion"
        return planner, Proposal(BatchPlan(context.total_batch_size, sizes), reason)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """The controller has no model of time."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Throughput by hardware identity."""
        return {"throughput": {identity: float(speed) for identity, speed in self.throughput.items()}}

    def loaded(self, state: dict[str, Any]) -> "ProportionalPlanner":
        """The planner with what :meth:`state_dict` described."""
        return replace(self, throughput={identity: float(speed) for identity, speed in state["throughput"].items()})


@dataclass(frozen=True)
class StaticPlanner:
    """Open-loop split by CPU cores or peak FLOPs, taken once (dynamic batching, sec. III-B).

    Example:
        >>> context = PlanContext(9, ("a", "b"), (1, 1), capacities=(2.0, 1.0))
        >>> StaticPlanner().initial(context) == Proposal(BatchPlan(9, (6, 3)), "in proportion to cores or peak FLOPs")
        True
    """

    def initial(self, context: PlanContext) -> Proposal | None:
        """Sizes in proportion to the capacities."""
        sizes = static_sizes(
            context.total_batch_size, context.capacities, min_local=context.min_local, max_local=context.max_local
        )
        return Proposal(BatchPlan(context.total_batch_size, sizes), "in proportion to cores or peak FLOPs")

    def decide(
        self, observations: StepObservations, current: BatchPlan, context: PlanContext
    ) -> tuple["StaticPlanner", Proposal | None]:
        """Never changes the split."""
        return self, None

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """No model of time."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Nothing is learned."""
        return {}

    def loaded(self, state: dict[str, Any]) -> "StaticPlanner":
        """Nothing to load."""
        return self


PLANNERS: dict[str, Callable[[], Planner]] = {
    "perf_model": PerfModelPlanner,
    "pid": ProportionalPlanner,
    "static": StaticPlanner,
}
