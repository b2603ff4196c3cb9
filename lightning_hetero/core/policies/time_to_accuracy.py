"""Density of compressed gradients, total batch and split decided together, by time to accuracy (StellaTrain, sec. 4).

The planner of the total, :mod:`lightning_hetero.core.policies.goodput`, with the exchange in its model: a total is
worth its goodput at the density that suits it best. With the messages taken out of the timings, the time model says
what a step takes that sends nothing, and the link what each density adds to it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from lightning_hetero.core.batching.goodput import Candidate, Window
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.bayesian_search import ProfilePenalty
from lightning_hetero.core.compression.objective import (
    Change,
    DensityChoice,
    assumed_penalty,
    minimise_time_to_accuracy,
)
from lightning_hetero.core.link.bandwidth import LinkEstimate, sending_rate
from lightning_hetero.core.link.late_choice import SAME_LINK, LateChoice
from lightning_hetero.core.link.message_link import LinkProbe, MessageLink, without_messages
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.policies.perf_model import Decision, PlanContext, Proposal

__all__ = ["NO_LIMIT", "TimeToAccuracyPlanner"]

NO_LIMIT = 2**31

GAIN = 0.02
"""Least predicted gain for which the density changes; around its optimum that is a factor of two or three."""

AGAIN = 2.0
"""Factor on that where messages were timed in vain before: out of many tries scatter makes one a gain."""

OPTIMISM = 3.0
"""Factor by which a link may be faster than small messages make it look, for larger ones to be timed."""

GROWTH, SMALL = 8.0, 16e3
"""Largest factor between messages and those that are timed, unless those have so few bytes."""

COST = 0.02
"""Share of the time that timing messages may take after it brought no change."""

LONGEST = 0.5
"""Share of computing that a message which is timed is believed to take at most."""

PER_DECADE = 4
"""Densities that are tried of each factor of ten."""

PARTS = {"believed": LinkEstimate, "late": LateChoice, "change": Change, "choice": DensityChoice}
NUMBERS = ("density", "latency", "handling", "next_probe", "refused")
"""Fields on which the next decision rests."""


@dataclass(frozen=True)
class TimeToAccuracyPlanner(GoodputPlanner):
    """Splits by the time model, and moves density and total to where time to accuracy is predicted to be least.

    Time to accuracy is ``(1 + g(density, B)) T(density, B) / B`` (eq. 5), in seconds per sample. ``g`` comes from a
    profile of the model; without one it is that of
    :func:`~lightning_hetero.core.compression.objective.assumed_penalty`, times what the gradient noise scale says of
    the total, ``(phi + B) / (phi + B_0)``.

    Args:
        min_density: least density, above 0.
        max_density: greatest density, to 1.
        moves_batch: whether the total may change, rather than density and split alone.
        profile: extra samples by density and total, ``None`` without a profile.
        idle_rule: believe in rates by the share of time that workers idle, as the paper does, not by transfers.
        believed: what the slowest worker's rate is believed to be.
        latency: seconds of it that its messages take however small they are; ``None`` for what was measured at first.
        change: newest change of the density, ``None`` before there is one.
        handling: seconds by which a byte more makes handling longer, which counts for higher densities and not for
            lower ones, so that none is chosen for a gain that it does not bring.
        late: what spoke for messages that come a step later.
        next_probe: step from which on messages of another size may be timed.
        refused: seconds of messages when that last brought no change, ``None`` if it did.
        density: newest decision, also that of an earlier run; ``None`` before there is one.
        choice: newest decision with its predictions, ``None`` before there is one.

    Example:
        >>> link = MessageLink(0.1, lambda density: 4e6 * density, (LinkEstimate(1e6),) * 2, seconds=0.4, step=40_000)
        >>> context = PlanContext(40, ("a", "b"), (1, 1), link=link)
        >>> sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 20)
        >>> zeros = np.zeros_like(sizes)
        >>> obs = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
        >>> planner, _ = TimeToAccuracyPlanner(initial_total=40).decide(obs, BatchPlan(40, (30, 10)), context)
        >>> planner.density, 0.001 <= planner.choice.probe < 0.002  # to be timed before anything changes
        (0.1, True)
    """

    max_total_batch_size: int = NO_LIMIT
    min_density: float = 0.001
    max_density: float = 0.3
    moves_batch: bool = False
    profile: ProfilePenalty | None = None
    idle_rule: bool = False
    believed: LinkEstimate = LinkEstimate()
    latency: float | None = None
    change: Change | None = None
    handling: float = 0.0
    late: LateChoice = LateChoice()
    next_probe: int = 0
    refused: float | None = None
    density: float | None = None
    choice: DensityChoice | None = None

    @property
    def densities(self) -> list[float]:
        """Densities that are tried; the best one may lie between two of them."""
        decades = math.log10(self.max_density / self.min_density)
        grid = np.geomspace(self.min_density, self.max_density, max(math.ceil(PER_DECADE * decades), 1) + 1)
        return [self.min_density, *grid[1:-1].tolist(), self.max_density]

    def extra(self, density: float, total: float, link: MessageLink) -> float:
        """``g``: extra samples that a density and a total cost by now, as a share, and messages that come late."""
        if self.profile is not None:
            return self.profile(density, total)
        return assumed_penalty(density, link.density, link.step, link.hidden and link.may_hide)

    def noise_scale(self, context: PlanContext) -> float | None:
        """Infinite where the total stays, and where the profile says what a total costs."""
        fixed = not self.moves_batch or self.profile is not None
        return math.inf if fixed else super().noise_scale(context)

    def ground(self, context: PlanContext) -> str:
        """What a change of the total rests on, for the log."""
        return (
            "by the profile and the link" if self.profile is not None else f"{super().ground(context)} and by the link"
        )

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """As the time model's planner, and the messages at the present density."""
        computing = super().predict(plan, context)
        link = self._link(context)
        if computing is None or link is None:
            return computing
        transfer = link.transfer(link.density)
        return max(computing, transfer) if link.hidden else computing + transfer

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the best total with its split, and choose the density for it."""
        planner = self._observe(observations, context)._forget_refusal(context.link)
        bare = without_messages(observations, context.link)
        split: Decision = super(TimeToAccuracyPlanner, planner).decide(bare, current, context)
        planner, proposal = cast(TimeToAccuracyPlanner, split.planner), split.proposal
        link, cluster = planner._link(context), planner.model.cluster(replace(context, accumulation=1))
        if link is None or cluster is None:
            return planner._decision(split)
        plan = current if proposal is None else proposal.plan
        if proposal is not None:
            split = replace(split, proposal=planner._whole_steps(proposal, current, context))
        seconds = cluster.accumulated(planner.accumulation).step_time(plan.local_batch_sizes)
        return planner._settle(plan.total_batch_size * planner.accumulation, seconds, link)._decision(split)

    def _whole_steps(self, proposal: Proposal, current: BatchPlan, context: PlanContext) -> Proposal:
        """The proposal whose predictions have the messages in them, which the split's do not."""
        plan = proposal.plan
        more = (self.predict(plan, context) or 0.0) - (super().predict(plan, context) or 0.0)
        first, without = (x if x is None else x + more for x in (plan.step_time, plan.step_time_without))
        plan = replace(plan, step_time=first, step_time_without=without)
        apart = ", messages apart" if plan.total_batch_size == current.total_batch_size else ""
        return Proposal(plan, proposal.reason + apart)

    def _decision(self, split: Decision) -> Decision:
        """What is decided on the split, and by now on messages."""
        if self.choice is None:
            return replace(split, planner=self)
        return replace(split, planner=self, density=self.choice, stale=self.choice.hidden, probe=self.choice.probe)

    def _settle(self, total: int, seconds: float, link: MessageLink) -> "TimeToAccuracyPlanner":
        """Decide on the density: at once if it has to be another, else by messages of both sizes that were timed."""
        turn, late = self._late(total, seconds, link)
        if late != link.hidden:
            planner = replace(self, late=turn, change=None, refused=None, next_probe=link.step)
            now = planner._at(link.density, total, seconds, replace(link, hidden=late))
            return replace(planner, density=link.density, choice=now)
        return replace(self, late=turn)._move(total, seconds, link)

    def _move(self, total: int, seconds: float, link: MessageLink) -> "TimeToAccuracyPlanner":
        """Choose the density, with messages awaited or delayed as they are."""
        wish = self.choose(total, seconds, link)
        inside = self.min_density <= link.density <= self.max_density
        if self.idle_rule or not inside:
            return replace(self, density=wish.density, choice=wish)
        now = self._at(link.density, total, seconds, link)
        timed = self._timed(now, seconds, link)
        if timed is not None and timed.density != link.density:
            return replace(self._changed(timed, now, link), density=timed.density, choice=timed)
        planner = self if timed is None else self._refuse(now, link)
        probe = planner._probe(wish, now, seconds, link)
        return replace(planner, density=link.density, choice=replace(now, probe=probe))

    def _late(self, total: int, seconds: float, link: MessageLink) -> tuple[LateChoice, bool]:
        """Whether messages are to come a step later: where the time that this gains is worth more than what it costs.

        Each way counts with the density that suits it best, and sending less goes first: only where nothing is to be
        gained by that, or messages were timed in vain, is a delay what is left.
        """
        less = self.refused is None and self.choose(total, seconds, link).density < link.density
        if not link.may_hide or (less and not link.hidden):
            return self.late, link.hidden
        fresh, late = (
            self._best(total, seconds, replace(link, hidden=hidden), self.densities).objective
            for hidden in (False, True)
        )
        return self.late.look(link.hidden, fresh, late, min(link.rates))

    def choose(self, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """The best density by what the link is believed to be; the present one if it is as good.

        Args:
            total: samples of a step.
            seconds: predicted seconds of a step that sends nothing.
            link: what messages cross.
        """
        return self._better(self._best(total, seconds, link, self.densities), total, seconds, link)

    def _better(
        self,
        best: DensityChoice,
        total: int,
        seconds: float,
        link: MessageLink,
        transfer: Callable[[float], float] | None = None,
    ) -> DensityChoice:
        """The best choice with a density of three digits, if it gains enough over the present one."""
        rounded = min(max(float(f"{best.density:.3g}"), self.min_density), self.max_density)
        best = replace(self._best(total, seconds, link, [rounded], transfer), least=best.least)
        now = replace(self._best(total, seconds, link, [link.density], transfer), least=best.least)
        allowed = self.min_density <= link.density <= self.max_density
        gain = GAIN if self.refused is None else AGAIN * GAIN
        return now if allowed and best.objective > (1 - gain) * now.objective else best

    def _at(self, density: float, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """What is predicted at a density, and whether even the least would be the bound."""
        return replace(self._best(total, seconds, link, [density]), least=link.transfer(self.min_density))

    def _timed(self, now: DensityChoice, seconds: float, link: MessageLink) -> DensityChoice | None:
        """The best density up to the size that was timed, by how much longer it takes; ``None`` if nothing was timed.

        The present one if nothing gains enough, or if it would take back the last change on the same link.
        """
        probe, total = link.probe, now.total_batch_size
        if probe is None or link.seconds is None:
            return None
        base, size = link.seconds, link.message_bytes
        low, high = sorted((probe.bytes_now, probe.num_bytes))
        near = [d for d in self.densities if low <= size(d) <= high]
        ends = [d for d in (self._asked(), link.density) if d is not None and low <= size(d) <= high]

        def transfer(density: float) -> float:
            return max(base + probe.added(size(density)), 0.0)

        best = self._best(total, seconds, link, sorted({*near, *ends, link.density}), transfer)
        best = replace(best, least=now.least)
        best = self._better(best, total, seconds, link, transfer)
        if best.density == link.density or not self._takes_back(best, probe, link):
            return replace(best, least=now.least)
        return now

    def _asked(self) -> float | None:
        return None if self.choice is None else self.choice.probe

    def _takes_back(self, choice: DensityChoice, probe: LinkProbe, link: MessageLink) -> bool:
        """Whether a choice goes back where the density came from although the link is the same."""
        before = self.change
        more = choice.density > link.density
        if before is None or more == before.more or before.total != choice.total_batch_size:
            return False
        if not 1 / SAME_LINK < choice.compute / max(before.compute, 1e-12) < SAME_LINK:
            return False
        num_bytes, seconds = (probe.num_bytes, probe.seconds) if more else (probe.bytes_now, probe.now)
        crossing = max(seconds - probe.latency, 0.0) * before.num_bytes / num_bytes
        return before.crossing / SAME_LINK < crossing if more else crossing < SAME_LINK * before.crossing

    def _changed(self, choice: DensityChoice, now: DensityChoice, link: MessageLink) -> "TimeToAccuracyPlanner":
        """Remember a change of the density, and what the larger of both messages took to cross the link."""
        probe, more = link.probe, choice.density > link.density
        assert probe is not None
        num_bytes, seconds = (probe.num_bytes, probe.seconds) if more else (probe.bytes_now, probe.now)
        crossing = max(seconds - probe.latency, 0.0)
        change = Change(link.density, num_bytes, crossing, choice.total_batch_size, now.compute, more)
        return replace(self, change=change, next_probe=link.step, refused=None)

    def _refuse(self, now: DensityChoice, link: MessageLink) -> "TimeToAccuracyPlanner":
        """Let so many steps pass before the next messages are timed that those cost next to nothing."""
        probe = link.probe
        assert probe is not None
        steps = math.ceil(2 * (probe.now + probe.seconds) / (COST * max(now.step_time, 1e-9)))
        return replace(self, next_probe=link.step + steps, refused=link.seconds)

    def _forget_refusal(self, link: MessageLink | None) -> "TimeToAccuracyPlanner":
        """Begin anew where messages take another time than when others were timed in vain."""
        if link is None or link.seconds is None or self.refused is None:
            return self
        same = 1 / SAME_LINK < link.seconds / self.refused < SAME_LINK
        return self if same else replace(self, refused=None, next_probe=link.step)

    def _probe(self, wish: DensityChoice, now: DensityChoice, seconds: float, link: MessageLink) -> float | None:
        """Density whose messages are to be timed: the wish, or a higher one if the link may be faster than it looks."""
        if link.seconds is None or link.step < self.next_probe:
            return None
        if wish.density >= link.density:
            faster = replace(link, estimates=tuple(LinkEstimate(OPTIMISM * rate) for rate in link.rates))
            wish = self.choose(now.total_batch_size, seconds, faster)
        if wish.density > link.density:
            return self._small_enough(wish.density, now, link)
        return None if link.message_bytes(wish.density) == link.bytes_now else wish.density

    def _small_enough(self, wished: float, now: DensityChoice, link: MessageLink) -> float | None:
        """The greatest density up to the wished one whose messages are not too large to be timed; ``None`` without."""
        most = max(GROWTH * link.bytes_now, SMALL)
        longest = max(LONGEST * now.compute, 2.0 * link.transfer(link.density))
        for density in (wished, *np.geomspace(link.density, wished, 12)[-2:0:-1].tolist()):
            num_bytes = link.message_bytes(density)
            if num_bytes <= most and link.transfer(density) <= longest:
                return float(density) if num_bytes > link.bytes_now else None
        return None

    def windows(self, total: int, context: PlanContext) -> tuple[Window, ...]:
        """Every total that may follow the current one; only itself where the total stays."""
        bounds = self if self.moves_batch else replace(self, max_total_batch_size=total, min_total_batch_size=total)
        return super(TimeToAccuracyPlanner, bounds).windows(total, context)

    def candidates(self, times: Mapping[Window, float], context: PlanContext) -> tuple[Candidate, ...]:
        """Goodput of candidates whose step times are known, at the density that suits each best."""
        table, link = super().candidates(times, context), self._link(context)
        return table if link is None else tuple(self._with_messages(candidate, link) for candidate in table)

    def _with_messages(self, candidate: Candidate, link: MessageLink) -> Candidate:
        total = candidate.total_batch_size
        best = self._best(total, candidate.step_time, link, self.densities)
        throughput = total / best.step_time
        share = candidate.efficiency / (1.0 + self.extra(best.density, total, link))
        return Candidate(total, candidate.accumulation, best.step_time, throughput, share, throughput * share)

    def _best(
        self,
        total: int,
        seconds: float,
        link: MessageLink,
        densities: list[float],
        transfer: Callable[[float], float] | None = None,
    ) -> DensityChoice:
        return minimise_time_to_accuracy(
            {total: seconds},
            densities,
            transfer=link.transfer if transfer is None else transfer,
            penalty=lambda density, total: self.extra(density, total, link),
            hidden=link.hidden,
            handling=lambda density: self.handling * max(link.message_bytes(density) - link.bytes_now, 0.0),
            headroom=SAME_LINK,
        )

    def _link(self, context: PlanContext) -> MessageLink | None:
        """The link as it is believed to be, ``None`` before it was seen."""
        link = context.link
        if link is None or not link.rates:
            return None
        latency = link.latency if self.latency is None else self.latency
        return link if self.believed.rate is None else replace(link, estimates=(self.believed,), latency=latency)

    def _observe(self, observations: StepObservations, context: PlanContext) -> "TimeToAccuracyPlanner":
        """Believe in what was measured of the slowest worker, or in what the paper's rule makes of it."""
        link = context.link
        if link is None or not link.rates or link.seconds is None:
            return self
        if self.believed.rate is None or not self.idle_rule:
            return self._learn(link, link.message_bytes(link.density), link.seconds)
        cluster, rows = self.model.cluster(context), np.isfinite(observations.step_time).all(axis=1)
        if cluster is None or not rows.any():
            return self
        computing, transfer = observations.compute[rows].max(axis=1), link.latency
        transfer += self.believed.seconds(link.message_bytes(link.density))
        explained = np.maximum(computing, transfer) if link.hidden else computing + cluster.t_u + transfer
        idle = 1.0 - float(np.median(explained / observations.step_time[rows].max(axis=1)))
        return replace(self, believed=self.believed.observe_idle(idle))

    def _learn(self, link: MessageLink, num_bytes: float, seconds: float) -> "TimeToAccuracyPlanner":
        """Rate from the newest messages, and from those of two sizes that were timed latency as well."""
        latency, probe = min(link.latency if self.latency is None else self.latency, seconds), link.probe
        if probe is None or probe.slope == 0.0:
            believed = self.believed.observe(sending_rate(num_bytes, seconds, latency))
            handling = self.handling if probe is None else probe.handling_slope
            return replace(self, believed=believed, latency=latency, handling=handling)
        latency = max(seconds - probe.slope * num_bytes, 0.0)
        believed = LinkEstimate(1.0 / probe.slope)
        return replace(self, believed=believed, latency=latency, handling=probe.handling_slope)

    def state_dict(self) -> dict[str, Any]:
        """What the time model learned, where the total stands, the density, and what it rests on."""
        parts = {name: None if (part := getattr(self, name)) is None else asdict(part) for name in PARTS}
        return {**super().state_dict(), **parts, **{name: getattr(self, name) for name in NUMBERS}}

    def loaded(self, state: dict[str, Any]) -> "TimeToAccuracyPlanner":
        """The planner with what :meth:`state_dict` described."""
        before: Any = super().loaded(state)
        parts = {n: None if state[n] is None else kind(**state[n]) for n, kind in PARTS.items() if n in state}
        planner: TimeToAccuracyPlanner = replace(before, **parts, **{n: state[n] for n in NUMBERS if n in state})
        return planner
