"""Policy of the time model: the exact optimum of the split by each worker's learned times (C sec. 3-4)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.checkpoint_state import check_checksums, with_checksums
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.newest_speed import since_change
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.split_reasons import costs_too_much, not_beyond_luck
from lightning_hetero.core.policies.split_rule import RuleSettings, cost, doubt, horizon
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.link_times import LinkTimes
from lightning_hetero.core.timing.prediction import StepPrediction
from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.timing.sync_skew import last_bucket_differences, likely_offsets, per_worker_offsets
from lightning_hetero.core.timing.times import Times
from lightning_hetero.core.timing.winsorized_mean import winsorized_mean

__all__ = ["PerfModelPlanner"]

Array = npt.NDArray[np.float64]


@checked_keywords
@dataclass(frozen=True)
class PerfModelPlanner:
    """Time model of each worker, and the split that is its exact optimum (C sec. 3-4).

    A posterior follows the workers' speeds (:mod:`lightning_hetero.core.timing.filters.time_posterior`);
    :mod:`lightning_hetero.core.timing.link_times` estimates the all-reduce. While a worker has been seen at one size
    only, its model goes through the origin, which makes the optimum the split of C eq. 8; the second size gives the
    line. The plan changes where that saves more than it costs (:mod:`lightning_hetero.core.policies.split_rule`).

    Args:
        times: time models of each piece of hardware, with their covariance.
        link: times of the all-reduce, by the number of workers.
        residual: measured minus predicted step time, which includes the time of the training loop itself.
        steps: steps of this run and of those that it continues.
        arrivals: seconds by which the all-reduce takes longer when this piece of hardware comes last than when others
            do, and their variance; only of hardware that came last. The excess over the least of them is the worker's
            own and counts into its constant time.
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

    # knowledge

    def knows(self, context: PlanContext) -> bool:
        """Return whether any current worker was observed; the others' times are taken from the one most like them."""
        return bool(self.link) and not set(self.times.names).isdisjoint(context.identities)

    def cluster(self, context: PlanContext) -> ClusterTimeModel | None:
        """Return the time model of the current ranks, ``None`` if all of them are unknown."""
        if not self.knows(context):
            return None
        return _optimal_model(self._prediction(self._times(context), context), context)

    def _times(self, context: PlanContext) -> Times:
        """Return the time models of the current workers, each with its own part of the all-reduce time."""
        times = self.times.times(context.identities, context.capacities)
        own, variance = self._own_offsets(context)
        times.mean[:, 1] += own
        times.covariance[:, 1, 1] += variance
        return times

    def _own_offsets(self, context: PlanContext) -> tuple[Array, Array]:
        """Return each worker's own seconds of the all-reduce, above the least of all workers, and their variance."""
        known, workers = self._known_offsets(context), len(context.identities)
        scale = self.link.at(workers)[1] if known and self.link else 0.0
        return likely_offsets(known, workers, scale, self.times.settings)

    def _known_offsets(self, context: PlanContext) -> dict[int, tuple[float, float]]:
        """Return :attr:`arrivals` by rank."""
        return {rank: self.arrivals[n] for rank, n in enumerate(context.identities) if n in self.arrivals}

    def _prediction(self, times: Times, context: PlanContext) -> StepPrediction:
        """Return the predictions for workers with these time models."""
        return StepPrediction(
            times, self.link, self.residual, context.min_local, context.accumulation, self.times.settings
        )

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict the seconds of a step (of a window, under accumulation) by C eq. 7."""
        if not self.knows(context):
            return None
        sizes = plan.local_batch_sizes
        return self._prediction(self._times(context), context).model(sizes).step_time(sizes)

    def error(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Return the standard error in seconds of :meth:`predict`."""
        if not self.knows(context):
            return None
        return self._prediction(self._times(context), context).error(plan.local_batch_sizes)

    # learning

    def observe(self, observations: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """Return the planner that has seen the observations."""
        if observations.num_steps == 0:
            return self
        names, settings = context.identities, self.times.settings
        elapsed = float(max(context.elapsed or 0, observations.num_steps))
        observations = since_change(observations)
        takes = float(np.median(np.nan_to_num(observations.last_sync).min(axis=1)))
        differences = last_bucket_differences(observations.last_sync, settings)
        found = per_worker_offsets(self._known_offsets(context), differences, takes, settings)
        planner = replace(
            self,
            times=self.times.observe(observations, names, elapsed),
            steps=self.steps + elapsed,
            arrivals={**self.arrivals, **{names[rank]: own for rank, own in found.items()}},
        )
        last = np.maximum(observations.last_sync - planner._own_offsets(context)[0], 0.0)
        link = self.link.observe(replace(observations, last_sync=last), context.accumulation, settings)
        planner = replace(planner, link=link)
        return planner._update_residual(observations, context)

    def _update_residual(self, observations: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """Compare the steps with their prediction, which does not include the time of the training loop itself."""
        rows = np.asarray(np.isfinite(observations.step_time).all(axis=1))
        if not rows.any():
            return self
        predicted, expected = self._prediction(self._times(context), context), 0.0
        bare = predicted.bare
        for split, steps in zip(
            *np.unique(observations.local_batch_sizes[rows], axis=0, return_counts=True), strict=True
        ):
            expected += predicted.waiting_factor(split) * bare.step_time(split) * float(steps / rows.sum())
        single = observations.step_time[rows].max(axis=1)
        measured = winsorized_mean(single)
        variance = float(np.var(single)) / max(measured, 1e-9) ** 2 / len(single)
        return replace(self, residual=self.residual.observe(expected, measured, variance, self.times.settings))

    # decisions

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose the optimum by what an earlier run learned of this hardware; equal sizes if all of it is new."""
        if not self.knows(context):
            return None
        predicted = self._prediction(self._times(context), context)
        plan = _optimum(_optimal_model(predicted, context), context)
        new = [rank for rank, name in enumerate(context.identities) if not self.times.knows((name,))]
        by = "peak FLOP/s" if context.capacities else "what the others take"
        more = f"; rank {', '.join(map(str, new))} is new and starts by {by}" if new else ""
        plan = replace(plan, step_time_error=predicted.error(plan.local_batch_sizes))
        return Proposal(plan, f"from the time models of an earlier run{more}")

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the optimum if it saves more than the change costs."""
        planner = self.observe(observations, context)
        if not planner.knows(context) or not planner.times.knows(context.identities):
            return Decision(planner, kept="too few observations: not every worker's time is known")
        times = planner._times(context)
        decision = planner._decide(times, current, context, first=not self.times.knows(context.identities))
        error = planner._prediction(times, context).error(current.local_batch_sizes)
        return replace(decision, error=error, moving=times.moving > 0.0)

    def _decide(self, times: Times, current: BatchPlan, context: PlanContext, *, first: bool) -> Decision:
        """Decide by the rule of the split, with the current time models."""
        predicted, running = self._prediction(times, context), _effective_sizes(current, context)
        cluster = predicted.model(running)
        now, plan = _step_time(cluster, current, context), _optimum(cluster, context)
        if plan.local_batch_sizes == current.local_batch_sizes:
            return Decision(self, kept=_why_optimal(current, context))
        other = replace(plan, cost=current.cost).split
        scaled = running * (context.total_batch_size / current.total_batch_size)
        gain, unknown = predicted.saving(cluster, plan.local_batch_sizes, scaled)
        steps = horizon(gain, times.walks, times.probability, self.steps, self.settings)
        costs = self.cost(now, context)
        if gain * now * steps <= costs:
            fixed = context.change_cost or 0.0
            return Decision(self, kept=costs_too_much(other, gain, now, steps, costs, fixed))
        equal = max(current.local_batch_sizes) - min(current.local_batch_sizes) <= context.multiple
        least = doubt(times.jitter, times.moving, equal, self.settings) * unknown
        if gain < least:
            jitter = times.single_steps(running)
            return Decision(self, kept=not_beyond_luck(other, gain, now, least, jitter))
        here = predicted.waiting_factor(running)
        then = predicted.waiting_factor(plan.local_batch_sizes) / here * (plan.step_time or now)
        saved = 1.0 - then / now
        if saved < context.hysteresis:
            takes = f"{other} would take {abs(saved):.1%} {'less' if saved > 0 else 'more'}"
            kept = f"the predicted gain is below hysteresis={context.hysteresis:g}: {takes}"
            return Decision(self, kept=f"{kept}, waiting in single steps included")
        error = predicted.error(plan.local_batch_sizes)
        plan = replace(plan, step_time=then, step_time_error=error)
        gained = f"step {now * 1e3:.1f} -> {then * 1e3:.1f} ms ({saved:.1%} less)"
        proposal = Proposal(plan, f"{self._why(context, first=first)}: {gained}")
        return Decision(self, proposal, soon=gain > self.settings.soon)

    def cost(self, step_time: float, context: PlanContext) -> float:
        """Return the seconds that a change costs: the steps of the rule, plus the given or measured seconds."""
        return cost(self.steps, self.settings) * step_time + (context.change_cost or 0.0)

    def _why(self, context: PlanContext, *, first: bool) -> str:
        """Say why another split is the optimum."""
        jumped = [rank for rank, name in enumerate(context.identities) if name in self.times.jumped]
        if jumped:
            return f"speed of rank {', '.join(map(str, jumped))} changed"
        return "first split, in proportion to measured speed" if first else "optimum of the time model"

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the time models by hardware identity, and the cluster's own coefficients."""
        state = {
            "times": self.times.state_dict(),
            "link": self.link.state_dict(),
            "residual": self.residual.state_dict(),
            "steps": float(self.steps),
            "arrivals": {identity: list(pair) for identity, pair in self.arrivals.items()},
        }
        return with_checksums(state)

    def loaded(self, state: Mapping[str, Any]) -> "PerfModelPlanner":
        """Return the planner restored from :meth:`state_dict`; a state of the former estimator is ignored.

        Raises:
            DamagedCheckpointError: if the state has changed since it was saved.
        """
        check_checksums(state, "the time models")
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
    return solve_optperf(
        cluster,
        context.total_batch_size,
        min_local=context.min_local,
        max_local=context.max_local,
        multiple=context.multiple,
    )


def _optimal_model(predicted: StepPrediction, context: PlanContext) -> ClusterTimeModel:
    """Return C eq. 7 plus the time by which steps with the optimal sizes exceed it."""
    return predicted.model(_optimum(predicted.bare, context).local_batch_sizes)


def _why_optimal(plan: BatchPlan, context: PlanContext) -> str:
    """Say why the current plan is the optimum."""
    sizes = plan.local_batch_sizes
    high = context.max_local or (plan.total_batch_size,) * len(sizes)
    held = [i for i, b in enumerate(sizes) if b in (context.min_local[i], high[i])]
    if held and len(sizes) > 1:
        return f"bounds hold: rank {', '.join(map(str, held))} at its minimum or maximum; the split is the optimum"
    if max(sizes) - min(sizes) <= context.multiple:
        return f"workers are equally fast: equal {'sizes are' if plan.cost is None else 'work is'} the optimum"
    return "the optimum runs already: the time model predicts no shorter step with another split"


def _effective_sizes(current: BatchPlan, context: PlanContext) -> Array:
    """Return the samples that each worker runs: at least its minimum, which counts with weight 0 if its size is 0."""
    return np.array(np.maximum(current.local_batch_sizes, context.min_local), dtype=float)


def _step_time(cluster: ClusterTimeModel, current: BatchPlan, context: PlanContext) -> float:
    """Predict the step time of the current split, scaled to the total of the next steps if it differs."""
    scale = context.total_batch_size / current.total_batch_size
    return max(cluster.step_time(np.asarray(current.local_batch_sizes) * scale), 1e-12)
