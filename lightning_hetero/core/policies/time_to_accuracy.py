"""Joint choice of density, total batch and split by time to accuracy, for compressed gradients (S sec. 4).

Extends the planner of the total, :mod:`lightning_hetero.core.policies.goodput`, by the messages: a total is worth its
goodput at the density that suits it best. The time model learns from timings without the messages, so it predicts a
step that sends nothing; the link predicts what each density adds.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.goodput import Candidate, Window
from lightning_hetero.core.batching.plan import NO_LIMIT, BatchPlan
from lightning_hetero.core.compression.bayesian_search import ProfilePenalty
from lightning_hetero.core.compression.density_search import best_densities
from lightning_hetero.core.compression.objective import (
    DensityChoice,
    assumed_penalty,
    minimise_time_to_accuracy,
    penalised_time,
    time_to_accuracy,
)
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_link import MessageLink, without_messages
from lightning_hetero.core.link.staleness import StaleHysteresis
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.validation import check_int, check_number

__all__ = ["DensitySettings", "TimeToAccuracyPlanner"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DensitySettings:
    """Limits and margins of the choice of a density.

    Args:
        min_relative_gain: least predicted gain for which the density changes, as a share, 0 to 1. Around the optimum, a
            gain of 2 percent takes a factor of two or three in density, so timing jitter does not trigger a change.
        max_growth: greatest factor by which the density grows in one decision, above 1. Only larger messages than any
            so far show how the link carries them; far too large ones would cost much time first.
        stale_headroom: factor by which the link may become slower while stale messages still take no longer than
            computing, 1 or more.
        densities_per_decade: densities that are tried first per factor of ten.

    Example:
        >>> DensitySettings().min_relative_gain
        0.02
    """

    min_relative_gain: float = 0.02
    max_growth: float = 1.4
    stale_headroom: float = 1.5
    densities_per_decade: int = 16

    def __post_init__(self) -> None:
        check_number("min_relative_gain", self.min_relative_gain, low=0.0, high=1.0)
        check_number("max_growth", self.max_growth, low=1.0, include_low=False)
        check_number("stale_headroom", self.stale_headroom, low=1.0)
        check_int("densities_per_decade", self.densities_per_decade, minimum=1)


@checked_keywords
@dataclass(frozen=True)
class TimeToAccuracyPlanner(GoodputPlanner):
    """Split by the time model, with the density and the total of least predicted time to accuracy.

    Time to accuracy is ``(1 + g(density, B)) T(density, B) / B`` (S eq. 5), in seconds per sample. ``g`` comes from a
    profile of the model. Without one, ``1 + g`` is that of
    :func:`~lightning_hetero.core.compression.objective.assumed_penalty` times the cost of the total by the gradient
    noise scale, ``(phi + B) / (phi + B_0)``.

    Args:
        min_density: least density, above 0.
        max_density: greatest density, to 1.
        moves_batch: whether the total may change, not only density and split.
        profile: extra samples by density and total, ``None`` without a profile.
        idle_rule: estimate rates by the share of time that workers idle, as the paper does, not by transfers.
        bandwidth: estimate of the slowest worker's rate by that rule.
        stale_state: sync rounds in favor of stale messages so far.
        density: newest decision, possibly of an earlier run; ``None`` before there is one.
        choice: newest decision with its predictions, ``None`` before there is one.
        density_settings: limits and margins of the choice of a density.

    Example:
        >>> from lightning_hetero.core.link.message_size import MessageSize
        >>> size = MessageSize(62_500, 2, parts=(32,), listed=80, marked=8000)
        >>> link = MessageLink(0.1, size, (LinkEstimate(1e6),) * 2, seconds=0.1, step=40_000)
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
    bandwidth: LinkEstimate = LinkEstimate()
    stale_state: StaleHysteresis = StaleHysteresis()
    density: float | None = None
    choice: DensityChoice | None = None
    density_settings: DensitySettings = DensitySettings()

    @property
    def densities(self) -> list[float]:
        """Densities that are tried first; the best one may lie between two of them."""
        count = math.ceil(self.density_settings.densities_per_decade * math.log10(self.max_density / self.min_density))
        grid = np.geomspace(self.min_density, self.max_density, max(count, 1) + 1)
        return [self.min_density, *grid[1:-1].tolist(), self.max_density]

    def extra(self, density: Array, total: Array, link: MessageLink) -> Array:
        """Return ``g``: extra samples that density, total and stale messages cost at present, as a share."""
        if self.profile is not None:
            return self.profile(density, total)
        return assumed_penalty(density, link.density, link.step, link.stale and link.may_be_stale)

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
        return max(transfer - computing, 0.0) if link.stale else transfer

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the best total with its split, and choose the density for it."""
        planner = self._observe(observations, context)
        bare = without_messages(observations, context.link)
        split: Decision = super(TimeToAccuracyPlanner, planner).decide(bare, current, context)
        planner, proposal = cast(TimeToAccuracyPlanner, split.planner), split.proposal
        link, cluster = planner._link(context), planner.model.cluster(replace(context, accumulation=1))
        if link is None or cluster is None:
            return split
        plan = current
        if proposal is not None:
            plan = proposal.plan
            split = replace(split, proposal=planner._whole_steps(proposal, current, context))
        total = plan.total_batch_size * planner.accumulation
        seconds = cluster.accumulated(planner.accumulation).step_time(plan.local_batch_sizes)
        stale_state, stale = planner._stale(total, seconds, link)
        if stale == link.stale:
            choice = planner.choose(total, seconds, link)
        else:
            choice = planner._at(link.density, total, seconds, replace(link, stale=stale))
        soon = split.soon or choice.density != link.density
        planner = replace(planner, stale_state=stale_state, density=choice.density, choice=choice)
        return replace(split, planner=planner, density=choice, stale=stale, soon=soon)

    def _whole_steps(self, proposal: Proposal, current: BatchPlan, context: PlanContext) -> Proposal:
        """Return the proposal with the time of the messages added to its predictions."""
        plan = proposal.plan
        more = self._waiting(plan.step_time or 0.0, context)
        first, without = (x if x is None else x + more for x in (plan.step_time, plan.step_time_without))
        plan = replace(plan, step_time=first, step_time_without=without)
        apart = ", messages apart" if plan.total_batch_size == current.total_batch_size else ""
        return Proposal(plan, proposal.reason + apart)

    def _stale(self, total: int, seconds: float, link: MessageLink) -> tuple[StaleHysteresis, bool]:
        """Decide whether messages are stale: where the time they save is worth more than the samples they cost.

        Stale and synchronous messages are compared at the best density of each. Lowering the density comes first:
        messages become stale only where a lower density gains nothing.
        """
        if not link.may_be_stale or (not link.stale and self.choose(total, seconds, link).density < link.density):
            return self.stale_state, link.stale
        waits, overlaps = (self._best(total, seconds, replace(link, stale=stale)).objective for stale in (False, True))
        return self.stale_state.observe(link.stale, 1.0 - overlaps / waits)

    def choose(self, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """Choose the best density for the estimated link, to three digits; the present one if it is as good.

        Args:
            total: samples of a step.
            seconds: predicted seconds of a step that sends nothing.
            link: link that the messages cross.
        """
        settings, now = self.density_settings, self._at(link.density, total, seconds, link)
        best = self._best(total, seconds, link)
        allowed = self.min_density <= link.density <= self.max_density
        if allowed and best.objective > (1.0 - settings.min_relative_gain) * now.objective:
            hopeful = link.at_best()
            best = self._best(total, seconds, hopeful)
            least = (1.0 - settings.min_relative_gain) * self._at(link.density, total, seconds, hopeful).objective
            if best.density <= link.density or best.objective > least:
                return now
        wished = min(best.density, link.density * settings.max_growth)
        rounded = float(f"{wished:.3g}")
        return self._at(min(max(rounded, self.min_density), self.max_density), total, seconds, link)

    def _at(self, density: float, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """Predict time to accuracy at a density, and the messages' time at the least density."""
        least, sent = link.transfer(np.array([self.min_density, density])).tolist()
        choice = DensityChoice(density, total, 0.0, seconds, sent, least, link.stale)
        extra = self.extra(np.array([density]), np.array([float(total)]), link)
        return replace(choice, objective=time_to_accuracy(float(total), choice.step_time, float(extra[0])))

    def _best(self, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """Return the best density, however little it gains."""
        return minimise_time_to_accuracy(
            {total: seconds},
            self.densities,
            transfer=link.transfer,
            penalty=lambda density, total: self.extra(density, total, link),
            stale=link.stale,
            headroom=self.density_settings.stale_headroom,
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
        totals, compute = np.array([(c.total_batch_size, c.step_time) for c in table]).T[:, :, None]
        headroom = self.density_settings.stale_headroom

        def objective(density: Array) -> Array:
            sent, extra = link.transfer(density), self.extra(density, totals, link)
            return penalised_time(totals, compute, sent, extra, stale=link.stale, headroom=headroom)

        found = best_densities(objective, self.densities)
        sent, compute, totals = link.transfer(found), compute[:, 0], totals[:, 0]
        seconds = np.maximum(compute, sent) if link.stale else compute + sent
        share = np.array([c.efficiency for c in table]) / (1.0 + self.extra(found, totals, link))
        columns = zip(table, seconds.tolist(), (totals / seconds).tolist(), share.tolist(), strict=True)
        return tuple([Candidate(c.total_batch_size, c.accumulation, s, t, e, t * e) for c, s, t, e in columns])

    def _link(self, context: PlanContext) -> MessageLink | None:
        """Return the link with the estimates in use, ``None`` before it was measured."""
        link = context.link
        if link is None or not link.rates:
            return None
        return link if self.bandwidth.rate is None else replace(link, estimates=(self.bandwidth,))

    def _observe(self, observations: StepObservations, context: PlanContext) -> "TimeToAccuracyPlanner":
        """Update the rate by the paper's rule, from the first measurement on, if ``idle_rule`` is set."""
        link = context.link
        if not self.idle_rule or link is None or not link.rates or link.seconds is None:
            return self
        if self.bandwidth.rate is None:
            return replace(self, bandwidth=link.estimates[link.slowest])
        cluster, rows = self.model.cluster(context), np.isfinite(observations.step_time).all(axis=1)
        if cluster is None or not rows.any():
            return self
        computing = observations.compute[rows].max(axis=1)
        transfer = link.latency + self.bandwidth.seconds(link.bytes_now)
        explained = np.maximum(computing, transfer) if link.stale else computing + cluster.t_u + transfer
        idle = 1.0 - float(np.median(explained / observations.step_time[rows].max(axis=1)))
        return replace(self, bandwidth=self.bandwidth.observe_idle(idle))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the time model, the total, the link's rate, the choice of staleness, and the density."""
        own = {"believed": {"rate": self.bandwidth.rate}, "late": asdict(self.stale_state), "density": self.density}
        return {**super().state_dict(), **own}

    def loaded(self, state: dict[str, Any]) -> "TimeToAccuracyPlanner":
        """Return the planner restored from :meth:`state_dict`."""
        before = cast(TimeToAccuracyPlanner, super().loaded(state))
        bandwidth = LinkEstimate(state["believed"]["rate"] if self.idle_rule else None)  # without it nothing updates it
        stale_state = StaleHysteresis(state["late"].get("rounds", 0))
        return replace(before, bandwidth=bandwidth, stale_state=stale_state, density=state["density"])
