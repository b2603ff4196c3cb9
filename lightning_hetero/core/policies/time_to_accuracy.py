"""Joint choice of density, total batch and split by time to accuracy, for compressed gradients (S sec. 4).

Extends the planner of the total, :mod:`lightning_hetero.core.policies.goodput`, by the messages: a total is worth its
goodput at the density that suits it best. The time model learns from timings without the messages, so it predicts a
step that sends nothing; the link predicts what each density adds. The density goes to its optimum at once, as that of
``compression="auto"`` does. Before any step it is that of the link alone, as if computing took no time; the first sync
round, after two steps, adds the computing time as it was measured, which the time model learns from a few more steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.goodput import Candidate, Window
from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan
from lightning_hetero.core.compression.auto import Computing
from lightning_hetero.core.compression.bayesian_search import ProfilePenalty
from lightning_hetero.core.compression.objective import (
    DensityChoice,
    density_penalty,
    minimise_time_to_accuracy,
    step_seconds,
)
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.bandwidth import idle_rate
from lightning_hetero.core.link.contention import Contention
from lightning_hetero.core.link.message_link import MessageLink, without_messages
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.goodput import GoodputPlanner

__all__ = ["TimeToAccuracyPlanner"]

Array = npt.NDArray[np.float64]

DENSITIES = 129
"""Densities to choose from, evenly spaced in their logarithm."""
LEAST_GAIN = 0.005
"""Least predicted gain for which the density changes. Around the optimum that takes a factor of two in density, so
timing jitter hardly triggers a change."""
FIRST_STEPS, SPLIT_STEPS = 5, 8
"""Steps that the first decision on split and total waits for, and each later one. The density follows from fewer."""


@checked_keywords
@dataclass(frozen=True)
class TimeToAccuracyPlanner(GoodputPlanner):
    """Split by the time model, with the density and the total of least predicted time to accuracy.

    Time to accuracy is ``(1 + g(density, B)) T(density, B) / B`` (S eq. 5), in seconds per sample. ``g`` comes from a
    profile of the model. Without one, ``1 + g`` is that of
    :func:`~lightning_hetero.core.compression.objective.density_penalty` times the cost of the total by the gradient
    noise scale, ``(phi + B) / (phi + B_0)``. Whether messages are stale is the user's choice, not the planner's.

    Args:
        min_density: least density, above 0.
        max_density: greatest density, to 1.
        moves_batch: whether the total may change, not only density and split.
        profile: extra samples by density and total, ``None`` without a profile.
        idle_rule: estimate rates by the share of time that workers idle, as the paper does, not by transfers.
        bandwidth: bytes per second of the slowest worker by that rule, ``None`` before the first.
        contention: what computing loses to stale messages under way.
        waiting: steps that the split and the total wait for more of.
        density: newest decision, possibly of an earlier run; ``None`` before there is one.
        choice: newest decision with its predictions, ``None`` before there is one.

    Example:
        >>> from lightning_hetero.core.link.message_size import MessageSize
        >>> size = MessageSize(62_500, 2, parts=(32,), listed=80, marked=8000)
        >>> link = MessageLink(0.1, size, (1e6, 1e6), seconds=0.1)
        >>> context = PlanContext(40, ("a", "b"), (1, 1), link=link)
        >>> sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 20)
        >>> zeros = np.zeros_like(sizes)
        >>> obs = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.1, zeros)
        >>> planner, _ = TimeToAccuracyPlanner(initial_total=40).decide(obs, BatchPlan(40, (30, 10)), context)
        >>> 0.001 < planner.density < 0.01
        True
    """

    max_total_batch_size: int = NO_LIMIT
    min_density: float = 0.001
    max_density: float = 0.3
    moves_batch: bool = False
    profile: ProfilePenalty | None = None
    idle_rule: bool = False
    bandwidth: float | None = None
    contention: Contention = Contention()
    waiting: StepObservations | None = None
    density: float | None = None
    choice: DensityChoice | None = None

    @property
    def densities(self) -> Array:
        """Densities to choose from."""
        return np.clip(np.geomspace(self.min_density, self.max_density, DENSITIES), self.min_density, self.max_density)

    def begin(self, link: MessageLink) -> "TimeToAccuracyPlanner":
        """Return the planner with the density of the first steps: the best one if computing took no time."""
        return replace(self, density=self.choose(self.initial_total or 1, 0.0, link).density)

    def extra(self, density: Array, total: Array) -> Array:
        """Return ``g``: extra samples that density and total cost, as a share."""
        return density_penalty(density) if self.profile is None else self.profile(density, total)

    def efficiencies(self, totals: Array, context: PlanContext) -> Array:
        """Return 1 where the total is fixed or the profile covers its cost; else the efficiency by the noise scale."""
        fixed = not self.moves_batch or self.profile is not None
        return np.ones_like(totals) if fixed else super().efficiencies(totals, context)

    def ground(self, context: PlanContext) -> str:
        """Return the grounds of a change of the total, for the log."""
        return (
            "by the profile and the link" if self.profile is not None else f"{super().ground(context)} and by the link"
        )

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict the seconds of a step, including the messages at the present density."""
        computing = super().predict(plan, context)
        return None if computing is None else computing + self._waiting(computing, context)

    def _waiting(self, computing: float, context: PlanContext) -> float:
        """Return the seconds that the messages at the present density add to a step."""
        link = self._link(context)
        if link is None:
            return 0.0
        transfer = link.transfer(link.density)
        return float(step_seconds(computing, transfer, stale=link.stale, drag=self.contention.drag)) - computing

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the best total with its split, and choose the density for it."""
        planner = self._observe(observations, context)
        seen = without_messages(observations, context.link, planner.contention.drag)
        if self.waiting is not None:
            seen = self.waiting.followed_by(seen)
        needed = SPLIT_STEPS if self.model.knows(context) else FIRST_STEPS
        if seen.num_steps < needed and not context.epoch_begins:
            split = Decision(replace(planner, waiting=seen))
        else:
            context = replace(context, elapsed=max(context.elapsed or 0, seen.num_steps))
            split = super(TimeToAccuracyPlanner, replace(planner, waiting=None)).decide(seen, current, context)
        planner, proposal = cast(TimeToAccuracyPlanner, split.planner), split.proposal
        link, cluster = planner._link(context), planner.model.cluster(replace(context, accumulation=1))
        if link is None or not (cluster or seen.num_steps):
            return split
        plan = current
        if proposal is not None:
            plan = proposal.plan
            split = replace(split, proposal=planner._whole_steps(proposal, current, context))
        total = plan.total_batch_size * planner.accumulation
        if cluster is None:  # as in compression="auto"
            seconds = planner.accumulation * Computing.of(seen).whole
        else:
            seconds = cluster.accumulated(planner.accumulation).step_time(plan.local_batch_sizes)
        choice = planner.choose(total, seconds, link)
        soon = split.soon or choice.density != link.density
        planner = replace(planner, density=choice.density, choice=choice)
        return replace(split, planner=planner, density=choice, soon=soon)

    def _whole_steps(self, proposal: Proposal, current: BatchPlan, context: PlanContext) -> Proposal:
        """Return the proposal with the time of the messages added to its predictions."""
        plan = proposal.plan
        more = self._waiting(plan.step_time or 0.0, context)
        first, without = (x if x is None else x + more for x in (plan.step_time, plan.step_time_without))
        plan = replace(plan, step_time=first, step_time_without=without)
        apart = ", messages apart" if plan.total_batch_size == current.total_batch_size else ""
        return Proposal(plan, proposal.reason + apart)

    def choose(self, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """Choose the best density for the measured link; the present one if it is almost as good.

        Args:
            total: samples of a step.
            seconds: predicted seconds of a step that sends nothing.
            link: link that the messages cross.
        """
        (best,) = self._best({total: seconds}, self.densities, link)
        if not self.min_density <= link.density <= self.max_density:
            return best
        (now,) = self._best({total: seconds}, np.array([link.density]), link)
        return best if best.objective < (1.0 - LEAST_GAIN) * now.objective else replace(now, least=best.least)

    def _best(self, step_times: Mapping[int, float], densities: Array, link: MessageLink) -> list[DensityChoice]:
        return minimise_time_to_accuracy(
            step_times,
            densities,
            transfer=link.transfer,
            penalty=self.extra,
            stale=link.stale,
            drag=self.contention.drag,
        )

    def windows(self, total: int, context: PlanContext) -> tuple[Window, ...]:
        """Return every total that may follow the current one; only the current one where the total is fixed."""
        bounds = self if self.moves_batch else replace(self, max_total_batch_size=total, min_total_batch_size=total)
        return super(TimeToAccuracyPlanner, bounds).windows(total, context)

    def candidates(self, times: Mapping[Window, float], context: PlanContext) -> tuple[Candidate, ...]:
        """Return the goodput of candidates whose step times are known, at the density that suits each best."""
        table, link = super().candidates(times, context), self._link(context)
        if link is None or not table:
            return table
        choices = self._best({c.total_batch_size: c.step_time for c in table}, self.densities, link)
        found = []
        for candidate, choice in zip(table, choices, strict=True):
            rate = candidate.total_batch_size / choice.step_time
            share = candidate.efficiency / (choice.objective * rate)
            candidate = replace(candidate, step_time=choice.step_time, throughput=rate)
            found.append(replace(candidate, efficiency=share, goodput=rate * share))
        return tuple(found)

    def _link(self, context: PlanContext) -> MessageLink | None:
        """Return the link with the estimates in use, ``None`` before it was measured."""
        link = context.link
        if link is None or not link.rates:
            return None
        return link if self.bandwidth is None else replace(link, rates=(self.bandwidth,))

    def _observe(self, observations: StepObservations, context: PlanContext) -> "TimeToAccuracyPlanner":
        """Update what stale messages cost and, if ``idle_rule`` is set, the rate by the paper's rule."""
        link = context.link
        if link is not None and link.stale and link.seconds is not None and observations.num_steps:
            sizes, own = observations.splits()[-1]
            first = min(own.start + 1, observations.num_steps - 1)  # the first step may have had older messages
            computing = float(np.median(observations.compute[first:], axis=0).max())
            which = (*sizes.tolist(), context.accumulation)
            found = self.contention.observe(which, max(computing, 1e-9), link.seconds)
            self = replace(self, contention=found)
        if not self.idle_rule or link is None or not link.rates or link.seconds is None:
            return self
        if self.bandwidth is None:
            return replace(self, bandwidth=min(link.rates))
        cluster, rows = self.model.cluster(context), np.isfinite(observations.step_time).all(axis=1)
        if cluster is None or not rows.any():
            return self
        computing = observations.compute[rows].max(axis=1)
        transfer = link.latency + link.bytes_now / self.bandwidth
        explained = np.maximum(computing, transfer) if link.stale else computing + cluster.t_u + transfer
        idle = 1.0 - float(np.median(explained / observations.step_time[rows].max(axis=1)))
        return replace(self, bandwidth=idle_rate(self.bandwidth, idle))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the time model, of the total, of the link's rate by idle time, and the density."""
        own = {"bandwidth": self.bandwidth, "density": self.density}
        return {**super().state_dict(), **own}

    def loaded(self, state: dict[str, Any]) -> "TimeToAccuracyPlanner":
        """Return the planner restored from :meth:`state_dict`."""
        before = cast(TimeToAccuracyPlanner, super().loaded(state))
        bandwidth = state.get("bandwidth") if self.idle_rule else None  # without it nothing updates it
        return replace(before, bandwidth=bandwidth, density=state["density"])
