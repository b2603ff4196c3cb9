"""The planner of the time model: the exact optimum of what was learned of every worker (Cannikin, sec. 3-4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.policies.split_rule import RuleSettings, cost, doubt, horizon
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.core.timing.expected_maximum import expected_maximum, larger_error
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels
from lightning_hetero.core.timing.sync_skew import last_bucket_differences, likely_offsets, per_worker_offsets
from lightning_hetero.core.timing.time_posterior import TimePosterior
from lightning_hetero.core.timing.times import Times
from lightning_hetero.core.timing.winsorized_mean import winsorized_mean

__all__ = [
    "Decision",
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

    Workers are known by a posterior that follows their speeds (:mod:`lightning_hetero.core.timing.time_posterior`),
    averaging by :mod:`lightning_hetero.core.timing.link_times`. While a worker was seen at one size only, its model
    goes through the origin, which makes the optimum the split of eq. 8; the second size gives the line. The plan
    changes where that saves more than it costs (:mod:`lightning_hetero.core.policies.split_rule`).

    Args:
        times: time models of each piece of hardware, with what is not certain of them.
        link: what averaging takes, by the number of workers.
        residual: what steps take longer than all this says, the loop's own time among it.
        steps: steps that took place, of the run and of those that it goes on with.
        arrivals: seconds of averaging by which each piece of hardware differs from others when it comes last, where it
            did, and their variance. What exceeds the least of them is its own, and counts into its constant time.
        settings: of the decision rule.

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
    times: TimePosterior = field(default_factory=TimePosterior)
    link: LinkTimes = field(default_factory=LinkTimes)
    residual: Residual = Residual()
    steps: float = 0.0
    arrivals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    settings: RuleSettings = RuleSettings()

    # what is known

    def knows(self, context: PlanContext) -> bool:
        """Whether any worker at hand was observed; what others take is then taken from the one most like them."""
        return bool(self.link) and not set(self.times.names).isdisjoint(context.identities)

    def cluster(self, context: PlanContext) -> ClusterTimeModel | None:
        """Time model of the ranks at hand, ``None`` if all of them are unknown."""
        if not self.knows(context):
            return None
        return self._cluster(self._times(context), context, None)

    def _times(self, context: PlanContext) -> Times:
        """Time models of the workers at hand, each with its own part of averaging."""
        times = self.times.times(context.identities, context.capacities)
        own, variance = self._own_arrivals(context)
        times.mean[:, 1] += own
        times.covariance[:, 1, 1] += variance
        return times

    def _own_arrivals(self, context: PlanContext) -> tuple[Array, Array]:
        """Each worker's own seconds of averaging, above the least of all workers at hand, and their variance."""
        known, workers = self._known_arrivals(context), len(context.identities)
        scale = self.link.at(workers)[1] if known and self.link else 0.0
        return likely_offsets(known, workers, scale, self.times.settings)

    def _known_arrivals(self, context: PlanContext) -> dict[int, tuple[float, float]]:
        """Seconds and variance by rank, of hardware that was seen to come last."""
        return {rank: self.arrivals[n] for rank, n in enumerate(context.identities) if n in self.arrivals}

    def _cluster(self, times: Times, context: PlanContext, sizes: Any) -> ClusterTimeModel:
        """With what steps of these sizes, or of the optimal ones, take longer than eq. 7 says."""
        bare = self._bare(times, context)
        sizes = _optimum(bare, context).local_batch_sizes if sizes is None else sizes
        more, less = max(self.residual.seconds, 0.0), min(self.residual.seconds, 0.0)
        factor = self._waits(times, sizes, context) * (1.0 + self.residual.share)
        factor += less / max(bare.step_time(sizes), 1e-12)  # nothing takes less than no time: as a share instead
        return bare.slowed(max(factor, 0.5) - 1.0, more)

    def _waits(self, times: Times, sizes: Any, context: PlanContext) -> float:
        """Factor by which the slowest worker of single steps takes longer than the slowest does on average."""
        seconds, _, scatter = self._finish(times, np.maximum(sizes, context.min_local).astype(float), context)
        return expected_maximum(seconds, scatter)[0] / float(seconds.max())

    def _bare(self, times: Times, context: PlanContext) -> ClusterTimeModel:
        """Eq. 7 alone, of a window of micro-batches."""
        link = self.link.at(len(context.identities))
        return ClusterTimeModel(NodeModels(times.mean), self._gamma, *link).accumulated(context.accumulation)

    @property
    def _gamma(self) -> float:
        """Share of the backward pass before the first bucket; the estimate itself may be just outside 0 to 1."""
        return min(max(self.link.gamma.value, 0.0), 1.0)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predicted seconds of a step (of a window, under accumulation) by Cannikin, eq. 7."""
        if not self.knows(context):
            return None
        cluster = self._cluster(self._times(context), context, plan.local_batch_sizes)
        return cluster.step_time(plan.local_batch_sizes)

    def error(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Standard error in seconds of :meth:`predict`."""
        if not self.knows(context):
            return None
        return self._error(self._times(context), plan.local_batch_sizes, context)

    def _error(self, times: Times, sizes: Any, context: PlanContext) -> float:
        seconds, errors, _ = self._finish(times, np.maximum(sizes, context.min_local).astype(float), context)
        step, spread = expected_maximum(seconds, errors)
        scale, link = self._waits(times, sizes, context), self.link.error(len(context.identities))
        waits = self.times.settings.waiting_error * (scale - 1.0) * step
        residual = self.residual.error(scale * step, self.times.settings)
        parts = (scale * spread, residual, min(link, step), waits)
        return float(np.sqrt(sum(part**2 for part in parts)))

    # what is learned

    def observe(self, observations: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """The planner that has seen the observations."""
        if observations.num_steps == 0:
            return self
        names, settings = context.identities, self.times.settings
        elapsed = float(max(context.elapsed or 0, observations.num_steps))
        takes = float(np.median(np.nan_to_num(observations.last_sync).min(axis=1)))
        differences = last_bucket_differences(observations.last_sync, settings)
        found = per_worker_offsets(self._known_arrivals(context), differences, takes, settings)
        planner = replace(
            self,
            times=self.times.observe(observations, names, elapsed),
            steps=self.steps + elapsed,
            arrivals={**self.arrivals, **{names[rank]: own for rank, own in found.items()}},
        )
        last = np.maximum(observations.last_sync - planner._own_arrivals(context)[0], 0.0)
        link = self.link.observe(replace(observations, last_sync=last), context.accumulation, settings)
        planner = replace(planner, link=link)
        return planner._compare(observations, context)

    def _compare(self, observations: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """What steps take longer than eq. 7 says: by the scatter of single workers, and by the loop's own time."""
        rows = np.asarray(np.isfinite(observations.step_time).all(axis=1))
        if not rows.any():
            return self
        times = self._times(context)
        bare = self._bare(times, context)
        expected = 0.0
        for split, own in observations.splits():
            part = float(rows[own].mean()) * len(rows[own]) / float(rows.sum())
            expected += self._waits(times, split, context) * bare.step_time(split) * part
        single = observations.step_time[rows].max(axis=1)
        measured = winsorized_mean(single)
        variance = float(np.var(single)) / max(measured, 1e-9) ** 2 / len(single)
        return replace(self, residual=self.residual.observe(expected, measured, variance, self.times.settings))

    def _finish(self, times: Times, sizes: Array, context: PlanContext) -> tuple[Array, Array, Array]:
        """When each worker is done: seconds, their standard errors, and the deviation of single steps."""
        n, gamma = context.accumulation, self._gamma
        t_o, t_u = self.link.at(len(context.identities))
        lines = []
        for share, after in ((1.0, t_u), (gamma, t_o + t_u)):
            seconds, errors = times.seconds(sizes, n - 1 + share, n)
            a, p = times.parts(sizes)
            single = n**0.5 * times.scatter  # of one micro-batch: their mean was observed
            scatter = np.hypot(a * single[:, 0] * n**0.5, p * single[:, 1] * (n - 1 + share**2) ** 0.5)
            lines.append((seconds + after, errors, scatter))
        (compute, compute_error, _), (send, send_error, _) = lines
        both = 0.5 * (times.seconds(sizes, 2 * (n - 1) + 1 + gamma, 2 * n)[1] ** 2 - compute_error**2 - send_error**2)
        errors = larger_error(compute, compute_error, send, send_error, both)
        seconds, _, scatter = (np.where(compute >= send, x, z) for x, z in zip(*lines, strict=True))
        return seconds, errors, scatter

    # what is decided

    def initial(self, context: PlanContext) -> Proposal | None:
        """Optimum of what an earlier run learned of this hardware; equal sizes if all of it is new."""
        if not self.knows(context):
            return None
        times = self._times(context)
        plan = _optimum(self._cluster(times, context, None), context)
        new = [rank for rank, name in enumerate(context.identities) if not self.times.knows((name,))]
        by = "peak FLOP/s" if context.capacities else "what the others take"
        more = f"; rank {', '.join(map(str, new))} is new and starts by {by}" if new else ""
        plan = replace(plan, step_time_error=self._error(times, plan.local_batch_sizes, context))
        return Proposal(plan, f"from the time models of an earlier run{more}")

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the optimum if it saves more than the change costs."""
        planner = self.observe(observations, context)
        if not planner.knows(context) or not planner.times.knows(context.identities):
            return Decision(planner, kept="too few observations: not every worker's time is known")
        times = planner._times(context)
        decision = planner._decide(times, current, context, first=not self.times.knows(context.identities))
        error = planner._error(times, current.local_batch_sizes, context)
        return replace(decision, error=error, moving=times.moving > 0.0)

    def _decide(self, times: Times, current: BatchPlan, context: PlanContext, *, first: bool) -> Decision:
        """The rule, for what is known by now."""
        cluster = self._cluster(times, context, _ran(current, context))
        now, plan = _step_time(cluster, current, context), _optimum(cluster, context)
        if plan.local_batch_sizes == current.local_batch_sizes:
            return Decision(self, kept=_why_optimal(plan, context))
        gain, unknown = self._gain(cluster, times, plan, current, context)
        steps = horizon(gain, times.walks, times.probability, self.steps, self.settings)
        costs = self.cost(now, context)
        other = f"{'/'.join(map(str, plan.local_batch_sizes))} would take {max(gain, 0.0):.1%} less"
        if gain * now * steps <= costs:
            kept = (
                f"a change would cost more than it saves: {other} for {steps:.0f} steps, and costs {costs * 1e3:.1f} ms"
            )
            return Decision(self, kept=kept)
        equal = max(current.local_batch_sizes) - min(current.local_batch_sizes) <= 1
        least = doubt(times.scatter, times.moving, equal, self.settings) * unknown
        if gain < least:
            kept = f"too little is known of the workers yet: {other}, and only a gain of {least:.1%} is beyond luck"
            return Decision(self, kept=kept)
        here = self._waits(times, _ran(current, context), context)
        then = self._waits(times, plan.local_batch_sizes, context) / here * (plan.step_time or now)
        saved = 1.0 - then / now
        if saved < context.hysteresis:
            other = f"{'/'.join(map(str, plan.local_batch_sizes))} would take {abs(saved):.1%}"
            other += f" {'less' if saved > 0 else 'more'}, waiting in single steps included"
            return Decision(self, kept=f"the predicted gain is below hysteresis={context.hysteresis:g}: {other}")
        error = self._error(times, plan.local_batch_sizes, context)
        plan = replace(plan, step_time=then, step_time_error=error)
        gained = f"step {now * 1e3:.1f} -> {then * 1e3:.1f} ms ({saved:.1%} less)"
        proposal = Proposal(plan, f"{self._why(context, first=first)}: {gained}")
        return Decision(self, proposal, soon=gain > self.settings.soon)

    def cost(self, step_time: float, context: PlanContext) -> float:
        """Seconds that a change costs: steps by the rule, and what is given or measured."""
        return cost(self.steps, self.settings) * step_time + (context.change_cost or 0.0)

    def _why(self, context: PlanContext, *, first: bool) -> str:
        """What makes another split the optimum."""
        jumped = [rank for rank, name in enumerate(context.identities) if name in self.times.jumped]
        if jumped:
            return f"speed of rank {', '.join(map(str, jumped))} changed"
        return "first split, in proportion to measured speed" if first else "optimum of the time model"

    def _gain(
        self, cluster: ClusterTimeModel, times: Times, plan: BatchPlan, current: BatchPlan, context: PlanContext
    ) -> tuple[float, float]:
        """Share of a step that a plan saves in expectation, and the share that it loses to what is not known.

        The slowest worker is as late as it may be. What is uncertain of workers at the running split stays so. What
        they take for other sizes than those that were seen is uncertain as well, but the first look at them will tell,
        so that it does not speak against them.
        """
        here = _ran(current, context) * (context.total_batch_size / current.total_batch_size)
        seconds, errors, _ = self._finish(times, here, context)

        def expected(finish: Array) -> tuple[float, float]:
            return expected_maximum(finish, finish * errors / seconds)

        there = cluster.finish_times(plan.local_batch_sizes)
        now, (then, spread) = expected(cluster.finish_times(here))[0], expected(there)
        return 1.0 - then / now, 1.0 - float(there.max()) / (then + spread)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Time models by hardware identity, and the cluster's own coefficients."""
        return {
            "times": self.times.state_dict(),
            "link": self.link.state_dict(),
            "residual": self.residual.state_dict(),
            "steps": float(self.steps),
            "arrivals": {identity: list(pair) for identity, pair in self.arrivals.items()},
        }

    def loaded(self, state: Mapping[str, Any]) -> "PerfModelPlanner":
        """The planner with what :meth:`state_dict` described; it learns anew where the former estimator wrote that."""
        if "profiles" in state:
            return PerfModelPlanner(settings=self.settings)
        return PerfModelPlanner(
            TimePosterior.from_state_dict(state["times"], self.times.settings),
            LinkTimes.from_state_dict(state["link"]),
            Residual.from_state_dict(state["residual"]),
            float(state["steps"]),
            {identity: (float(pair[0]), float(pair[1])) for identity, pair in state["arrivals"].items()},
            self.settings,
        )


def _optimum(cluster: ClusterTimeModel, context: PlanContext) -> BatchPlan:
    return solve_optperf(cluster, context.total_batch_size, min_local=context.min_local, max_local=context.max_local)


def _why_optimal(plan: BatchPlan, context: PlanContext) -> str:
    """Why the current plan is the optimum."""
    sizes = plan.local_batch_sizes
    high = context.max_local or (plan.total_batch_size,) * len(sizes)
    held = [i for i, b in enumerate(sizes) if b in (context.min_local[i], high[i])]
    if held and len(sizes) > 1:
        return f"bounds hold: rank {', '.join(map(str, held))} at its minimum or maximum; the split is the optimum"
    if max(sizes) - min(sizes) <= 1:
        return "workers are equally fast: equal sizes are the optimum"
    return "the optimum runs already: the time model predicts no shorter step with another split"


def _ran(current: BatchPlan, context: PlanContext) -> Array:
    """Samples that each worker runs: its minimum at least, with weight 0 where its size is 0."""
    return np.array(np.maximum(current.local_batch_sizes, context.min_local), dtype=float)


def _step_time(cluster: ClusterTimeModel, current: BatchPlan, context: PlanContext) -> float:
    """Predicted time under the current split, scaled to the total of the next steps if that is another one."""
    scale = context.total_batch_size / current.total_batch_size
    return max(cluster.step_time(np.asarray(current.local_batch_sizes) * scale), 1e-12)
