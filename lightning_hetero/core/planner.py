"""Policies: from observations to the next plan, as pure values.

A planner is replaced, never changed in place: ``decide(observations, current, context) -> (planner, proposal)``. It
can be replayed, checkpointed and tested with no process and no clock. The table :data:`PLANNERS` lists all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.arrivals import arrival_differences, own_arrivals
from lightning_hetero.core.evidence import Evidence
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.optperf import solve_optperf
from lightning_hetero.core.pace import pace
from lightning_hetero.core.plan import BatchPlan, proportional_sizes
from lightning_hetero.core.profile import NodeProfile
from lightning_hetero.core.proportional import ProportionalPlanner, StaticPlanner
from lightning_hetero.core.proposal import Decision, PlanContext, Planner, Proposal
from lightning_hetero.core.time_model import (
    ClusterTimeModel,
    estimate_gamma,
    estimate_sync_times,
)
from lightning_hetero.core.unexplained import Unexplained

__all__ = [
    "Decision",
    "PLANNERS",
    "PerfModelPlanner",
    "PlanContext",
    "Planner",
    "Proposal",
    "ProportionalPlanner",
    "StaticPlanner",
]


Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PerfModelPlanner:
    """Learn a time model of each worker and take its exact optimum (Cannikin, sec. 3-4).

    While a worker was seen at one size only its model goes through the origin, which makes the optimum the split of
    eq. 8; the second size gives the line. What the running split takes is what looks at it saw; the model says what
    others take beside it. A plan is changed only for a predicted gain above the hysteresis, and only as far as looks
    make certain (:class:`~lightning_hetero.core.evidence.Evidence`), so that scatter neither splits equal workers nor
    moves a split back and forth.

    Args:
        profiles: what is known of each piece of hardware.
        gamma: share of the backward pass before the first bucket.
        sync_times: ``(t_o, t_u)`` in seconds, ``None`` before the first observation.
        unexplained: what steps take longer than eq. 7 says; the same share and seconds for every split.
        arrivals: seconds of averaging by which each piece of hardware differs from others when it comes last, where it
            did. What exceeds the least of them is that worker's own, and counts into its constant time.
        evidence: what looks at the running split have shown.

    Example:
        >>> context = PlanContext(40, ("a", "b"), (1, 1))
        >>> sizes = np.full((5, 2), 20.0)
        >>> zeros = np.zeros_like(sizes)
        >>> obs = StepObservations(sizes, zeros, sizes * [0.001, 0.003], zeros, zeros, zeros, zeros)
        >>> planner, proposal = PerfModelPlanner().decide(obs, BatchPlan(40, (20, 20)), context)
        >>> proposal.plan.local_batch_sizes
        (30, 10)
    """

    moves_total: ClassVar[bool] = False
    profiles: Mapping[str, NodeProfile] = field(default_factory=dict)
    gamma: float = 1.0
    sync_times: tuple[float, float] | None = None
    unexplained: Unexplained = Unexplained()
    arrivals: Mapping[str, float] = field(default_factory=dict)
    evidence: Evidence = Evidence()

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
        planner = PerfModelPlanner(profiles, gamma, (t_o, t_u), arrivals=arrivals, evidence=self.evidence)
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

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the optimum if it gains enough over the current plan."""
        planner = self._look(observations, current, context)
        model = planner.cluster(context)
        if model is None:
            return Decision(planner, kept="too few observations: not every worker's time is known")
        cluster = planner._as_seen(model, current, context)
        now = _step_time(cluster, current, context)
        plan = planner._certain(_optimum(cluster, context), cluster, current, context)
        gain = 1.0 - (plan.step_time or now) / now
        if gain < context.hysteresis or plan.local_batch_sizes == current.local_batch_sizes:
            return Decision(planner, kept=_why_kept(_optimum(cluster, context), plan, now, current, context))
        known = [planner.profiles[identity] for identity in context.identities]
        if any(profile.drifted for profile in known):
            drifted = [rank for rank, profile in enumerate(known) if profile.drifted]
            why = f"speed of rank {', '.join(map(str, drifted))} changed"
        elif any(len(profile.sizes) < 2 for profile in known):
            why = "first split, in proportion to measured speed"
        else:
            why = "optimum of the time model"
        gained = f"{why}: step {now * 1e3:.1f} -> {(plan.step_time or now) * 1e3:.1f} ms ({gain:.0%} less)"
        return Decision(planner, Proposal(plan, gained))

    def _look(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> "PerfModelPlanner":
        """The planner that has seen the observations, and what they say for or against the running split."""
        names, sizes = context.identities, _ran(current, context)
        before = [self.profiles.get(name, NodeProfile()) for name in names]
        known = [profile.expected(int(b)) for profile, b in zip(before, sizes, strict=True)]
        planner = self.observe(observations, context)
        changed = any(name in planner.profiles and planner.profiles[name].drifted for name in names)
        seconds = observations.compute[(observations.local_batch_sizes == sizes).all(axis=1)]
        return replace(
            planner, evidence=self.evidence.look(names, current.local_batch_sizes, seconds, known, changed=changed)
        )

    def _as_seen(self, cluster: ClusterTimeModel, current: BatchPlan, context: PlanContext) -> ClusterTimeModel:
        """The model, each worker of which takes for its present samples what was seen."""
        seen = self.evidence.seconds(context.identities, current.local_batch_sizes)
        if seen is None:
            return cluster
        models = [self.profiles[name].model() for name in context.identities]
        known = [model.compute_time(b) for model, b in zip(models, _ran(current, context), strict=True)]
        return cluster.scaled((seen / np.maximum(known, 1e-12)).tolist())

    def _certain(
        self, best: BatchPlan, cluster: ClusterTimeModel, current: BatchPlan, context: PlanContext
    ) -> BatchPlan:
        """As much of the way to the best plan as is certain; the current plan if nothing is."""
        seen = self.evidence.seconds(context.identities, current.local_batch_sizes)
        if seen is None:
            return current
        later = np.log(cluster.finish_times(_ran(current, context)) / np.maximum(seen, 1e-12))
        certainty, total = self.evidence.certainty(best.local_batch_sizes, later), best.total_batch_size
        here = np.array(current.local_batch_sizes) * (total / current.total_batch_size)
        mixed = here + certainty * (np.array(best.local_batch_sizes) - here)
        sizes = proportional_sizes(total, mixed, min_local=context.min_local, max_local=context.max_local)
        return (
            current if certainty == 0.0 else replace(best, local_batch_sizes=sizes, step_time=cluster.step_time(sizes))
        )

    def state_dict(self) -> dict[str, Any]:
        """Profiles by hardware identity, and the cluster's own coefficients."""
        return {
            "profiles": {identity: profile.state_dict() for identity, profile in self.profiles.items()},
            "gamma": float(self.gamma),
            "sync_times": None if self.sync_times is None else [float(t) for t in self.sync_times],
            "unexplained": [list(window) for window in self.unexplained.windows],
            "arrivals": {identity: float(seconds) for identity, seconds in self.arrivals.items()},
            "evidence": self.evidence.state_dict(),
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
            Evidence.from_state_dict(state.get("evidence", {})),
        )


def _blend(old: float, new: float, share: float = 0.3) -> float:
    return old + share * (new - old)


def _optimum(cluster: ClusterTimeModel, context: PlanContext) -> BatchPlan:
    return solve_optperf(cluster, context.total_batch_size, min_local=context.min_local, max_local=context.max_local)


def _why_kept(best: BatchPlan, certain: BatchPlan, now: float, current: BatchPlan, context: PlanContext) -> str:
    """Why the current plan stays, although ``best`` is the optimum and ``certain`` what of it is certain."""
    sizes, gain = best.local_batch_sizes, 1.0 - (best.step_time or now) / now
    if sizes == current.local_batch_sizes:
        high = context.max_local or (best.total_batch_size,) * len(sizes)
        held = [i for i, b in enumerate(sizes) if b in (context.min_local[i], high[i])]
        if held and len(sizes) > 1:
            return f"bounds hold: rank {', '.join(map(str, held))} at its minimum or maximum; the split is the optimum"
        if max(sizes) - min(sizes) <= 1:
            return "workers are equally fast: equal sizes are the optimum"
        return "the optimum runs already: the time model predicts no shorter step with another split"
    other = f"{'/'.join(map(str, sizes))} would take {gain:.1%} less"
    if gain < context.hysteresis:
        return f"the predicted gain is below hysteresis={context.hysteresis:g}: {other}"
    return f"the predicted gain is not significant yet: {other}"


def _ran(current: BatchPlan, context: PlanContext) -> Array:
    """Samples that each worker runs: its minimum at least, with weight 0 where its size is 0."""
    return np.array(np.maximum(current.local_batch_sizes, context.min_local), dtype=float)


def _step_time(cluster: ClusterTimeModel, current: BatchPlan, context: PlanContext) -> float:
    """Predicted time under the current split, scaled to the total of the next steps if that is another one."""
    scale = context.total_batch_size / current.total_batch_size
    return max(cluster.step_time(np.asarray(current.local_batch_sizes) * scale), 1e-12)


PLANNERS: dict[str, Callable[[], Planner]] = {
    "perf_model": PerfModelPlanner,
    "pid": ProportionalPlanner,
    "static": StaticPlanner,
}
