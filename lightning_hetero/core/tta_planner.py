"""Density of compressed gradients, total batch and split decided together, by time to accuracy (StellaTrain, sec. 4).

The planner of the total, :mod:`lightning_hetero.core.adaptive`, with the exchange in its model: a total is worth its
goodput at the density that suits it best. With the messages taken out of the timings, the time model says what a step
takes that sends nothing, and the link what each density adds to it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_hetero.core.adaptive import GoodputPlanner
from lightning_hetero.core.bandwidth import LinkEstimate, MessageLink, sending_rate
from lightning_hetero.core.goodput import Candidate
from lightning_hetero.core.plan import BatchPlan
from lightning_hetero.core.planner import PlanContext, Proposal
from lightning_hetero.core.surrogate import ProfilePenalty
from lightning_hetero.core.time_model import ClusterTimeModel, StepObservations
from lightning_hetero.core.tta import DensityChoice, density_penalty, minimise_time_to_accuracy

__all__ = ["NO_LIMIT", "TimeToAccuracyPlanner", "without_messages"]

NO_LIMIT = 2**31

GAIN = 0.02
"""Least predicted gain for which the density changes; around its optimum that is a factor of two or three."""

OPTIMISM = 3.0
"""Factor by which a link may be faster than small messages make it look, for a higher density to be tried."""

CHEAP = 0.25
"""That is tried while messages take so much of computing at most."""

SAME_LINK = 1.5
"""Factor within which the rate has to be what messages of two sizes have shown for the link to be the same."""

LEAST_PATIENCE, MOST_PATIENCE = 4, 64
"""Decisions between two tries of a higher density: the first pause, which doubles, and the longest."""

TWO_SIZES = 1.5
"""Least factor between two sizes that tell latency from rate."""

PER_DECADE = 4
"""Densities that are tried of each factor of ten."""


@dataclass(frozen=True)
class TimeToAccuracyPlanner(GoodputPlanner):
    """Splits by the time model, and moves density and total to where time to accuracy is predicted to be least.

    Time to accuracy is ``(1 + g(density, B)) T(density, B) / B`` (eq. 5), in seconds per sample. ``g`` comes from a
    profile of the model; without one it is that of :func:`~lightning_hetero.core.tta.density_penalty`, times what the
    gradient noise scale says of the total, ``(phi + B) / (phi + B_0)``.

    Args:
        min_density: least density, above 0.
        max_density: greatest density, to 1.
        moves_batch: whether the total may change, rather than density and split alone.
        profile: extra samples by density and total, ``None`` without a profile.
        idle_rule: believe in rates by the share of time that workers idle, as the paper does, not by transfers.
        believed: what the slowest worker's rate is believed to be.
        latency: seconds of it that its messages take however small they are; ``None`` for what was measured at first.
        before: bytes and seconds of its messages before the density changed, ``None`` if it did not just now.
        tried: rate that messages of two sizes have shown, ``None`` before there were any.
        waited: decisions since a higher density was tried.
        patience: decisions to wait before the next try, twice as many after each.
        density: newest decision, also that of an earlier run; ``None`` before there is one.
        choice: newest decision with its predictions, ``None`` before there is one.

    Example:
        >>> link = MessageLink(0.1, lambda density: 4e6 * density, (LinkEstimate(1e6),) * 2, seconds=0.4)
        >>> context = PlanContext(40, ("a", "b"), (1, 1), link=link)
        >>> sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 20)
        >>> zeros = np.zeros_like(sizes)
        >>> obs = StepObservations(sizes, zeros, 0.05 + sizes * [0.001, 0.003], zeros, zeros, zeros + 0.4, zeros)
        >>> planner, _ = TimeToAccuracyPlanner(initial_total=40).decide(obs, BatchPlan(40, (30, 10)), context)
        >>> 0.001 <= planner.density < 0.002
        True
    """

    max_total_batch_size: int = NO_LIMIT
    min_density: float = 0.001
    max_density: float = 0.3
    moves_batch: bool = False
    profile: ProfilePenalty | None = None
    idle_rule: bool = False
    believed: LinkEstimate = LinkEstimate()
    latency: float | None = None
    before: tuple[float, float] | None = None
    tried: float | None = None
    waited: int = MOST_PATIENCE
    patience: int = LEAST_PATIENCE
    density: float | None = None
    choice: DensityChoice | None = None

    @property
    def densities(self) -> list[float]:
        """Densities that are tried; the best one may lie between two of them."""
        decades = math.log10(self.max_density / self.min_density)
        grid = np.geomspace(self.min_density, self.max_density, max(math.ceil(PER_DECADE * decades), 1) + 1)
        return [self.min_density, *grid[1:-1].tolist(), self.max_density]

    def extra(self, density: float, total: float) -> float:
        """``g``: extra samples that a density and a total cost, as a share."""
        return density_penalty(density) if self.profile is None else self.profile(density, total)

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

    def decide(
        self, observations: StepObservations, current: BatchPlan, context: PlanContext
    ) -> tuple["TimeToAccuracyPlanner", Proposal | None]:
        """Learn from the observations; propose the best total with its split, and choose the density for it."""
        planner = self._observe(observations, context)
        bare = without_messages(observations, context.link)
        planner, proposal = super(TimeToAccuracyPlanner, planner).decide(bare, current, context)  # type: ignore[assignment]
        link, cluster = planner._link(context), planner.model.cluster(replace(context, accumulation=1))
        if link is None or cluster is None:
            return planner, proposal
        plan = current if proposal is None else proposal.plan
        seconds = cluster.accumulated(planner.accumulation).step_time(plan.local_batch_sizes)
        choice = planner.choose(plan.total_batch_size * planner.accumulation, seconds, link)
        planner = planner._try_more(choice, link)
        if planner.density != link.density and link.seconds is not None:
            planner = replace(planner, before=(link.message_bytes(link.density), link.seconds))
        return planner, proposal

    def choose(self, total: int, seconds: float, link: MessageLink) -> DensityChoice:
        """The best density for a total whose step takes ``seconds`` without messages; the present one if it is as good.

        Args:
            total: samples of a step.
            seconds: predicted seconds of a step that sends nothing.
            link: what messages cross.
        """
        best = self._best(total, seconds, link, self.densities)
        rounded = min(max(float(f"{best.density:.3g}"), self.min_density), self.max_density)
        best = replace(self._best(total, seconds, link, [rounded]), least=best.least)
        now = replace(self._best(total, seconds, link, [link.density]), least=best.least)
        allowed = self.min_density <= link.density <= self.max_density
        return now if allowed and best.objective > (1 - GAIN) * now.objective else best

    def candidates(self, cluster: ClusterTimeModel, total: int, context: PlanContext) -> tuple[Candidate, ...]:
        """Goodput of every total that may follow, at the density that suits it best."""
        bounds = self if self.moves_batch else replace(self, max_total_batch_size=total, min_total_batch_size=total)
        table = super(TimeToAccuracyPlanner, bounds).candidates(cluster, total, context)
        link = self._link(context)
        return table if link is None else tuple(self._with_messages(candidate, link) for candidate in table)

    def _with_messages(self, candidate: Candidate, link: MessageLink) -> Candidate:
        total = candidate.total_batch_size
        best = self._best(total, candidate.step_time, link, self.densities)
        throughput = total / best.step_time
        share = candidate.efficiency / (1.0 + self.extra(best.density, total))
        return Candidate(total, candidate.accumulation, best.step_time, throughput, share, throughput * share)

    def _best(self, total: int, seconds: float, link: MessageLink, densities: list[float]) -> DensityChoice:
        return minimise_time_to_accuracy(
            {total: seconds}, densities, transfer=link.transfer, penalty=self.extra, hidden=link.hidden
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
        """Rate from the newest messages; after a change of density latency as well, from messages of two sizes."""
        latency = min(link.latency if self.latency is None else self.latency, seconds)
        other, took = (num_bytes, seconds) if self.before is None else self.before
        if max(num_bytes, other) < TWO_SIZES * min(num_bytes, other):
            rate = sending_rate(num_bytes, seconds, latency)
            return replace(self, believed=self.believed.observe(rate), latency=latency, before=None)
        slope = max((seconds - took) / (num_bytes - other), 0.0)
        latency = min(max(seconds - slope * num_bytes, 0.0), seconds)
        rate = sending_rate(num_bytes, seconds, latency)
        return replace(self, believed=LinkEstimate(rate), latency=latency, before=None, tried=rate)

    def _try_more(self, choice: DensityChoice, link: MessageLink) -> "TimeToAccuracyPlanner":
        """Keep the choice, or try a higher density where small messages may make the link look slower than it is.

        What a small message takes is latency rather than sending, which messages of two sizes tell apart. It is not
        tried again until the link changes, and ever more rarely: a link that scatters would be tried all the time.
        """
        waited = min(self.waited + 1, MOST_PATIENCE)
        kept = replace(self, density=choice.density, choice=choice, waited=waited)
        rate, tried = self.believed.rate, self.tried
        known = tried is not None and rate is not None and tried / SAME_LINK < rate < tried * SAME_LINK
        cheap = link.seconds is not None and link.seconds < CHEAP * choice.compute
        due = waited >= self.patience and choice.density == link.density
        if rate is None or self.idle_rule or known or not cheap or not due:
            return kept
        faster = replace(link, estimates=(LinkEstimate(OPTIMISM * rate),))
        more = self.choose(choice.total_batch_size, choice.compute, faster)
        if more.density <= link.density or link.message_bytes(more.density) <= link.message_bytes(link.density):
            return kept
        more = replace(self._best(choice.total_batch_size, choice.compute, link, [more.density]), least=choice.least)
        patience = min(2 * self.patience, MOST_PATIENCE)
        return replace(self, density=more.density, choice=more, waited=0, patience=patience)

    def state_dict(self) -> dict[str, Any]:
        """What the time model learned, where the total stands, and the density."""
        return {**super().state_dict(), "density": self.density}

    def loaded(self, state: dict[str, Any]) -> "TimeToAccuracyPlanner":
        """The planner with what :meth:`state_dict` described."""
        before: Any = super().loaded(state)
        density = state["density"]
        planner: TimeToAccuracyPlanner = replace(before, density=None if density is None else float(density))
        return planner


def without_messages(observations: StepObservations, link: MessageLink | None) -> StepObservations:
    """The same steps as if they had sent nothing: synchronisation and step time shorter by the messages' time.

    Of messages that travel while the next step computes, synchronisation and step time say nothing about computing.

    Example:
        >>> zeros = np.zeros((1, 2))
        >>> seen = StepObservations(zeros, zeros, zeros, zeros, zeros, zeros + 0.5, zeros + 2.0)
        >>> bare = without_messages(seen, MessageLink(0.1, float, (), seconds=0.375))
        >>> bare.last_sync.tolist(), bare.step_time.tolist()
        ([[0.125, 0.125]], [[1.625, 1.625]])
    """
    if link is None:
        return observations
    if link.hidden:
        nothing = np.zeros_like(observations.last_sync)
        return replace(observations, last_sync=nothing, step_time=nothing * np.nan)
    seconds = link.seconds or 0.0
    return replace(
        observations,
        last_sync=np.maximum(observations.last_sync - seconds, 0.0),
        step_time=np.maximum(observations.step_time - seconds, 1e-9),
    )
