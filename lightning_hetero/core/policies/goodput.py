"""Policy that decides on total batch size and split together, by goodput (C sec. 4.1 and 4.5)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.goodput import (
    Candidate,
    Window,
    candidate_totals,
    choose_total,
    goodput_of,
    in_equal_parts,
    step_times,
    windows_of,
)
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.planner import SOON, PerfModelPlanner
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.rounded import rounded

__all__ = ["GoodputPlanner"]

Array = npt.NDArray[np.float64]

PROBE = 1.5
"""Factor to the next total if a worker has been seen at one size only: enough to tell its fixed time."""
MOST_WASTE = 0.2
"""Largest loss of efficiency for that, as a share; it lasts until the next sync round."""


@checked_keywords
@dataclass(frozen=True)
class GoodputPlanner:
    """Split by the time model, and the total with the highest goodput.

    A total that exceeds the memory of all workers runs as several micro-batches; their number changes only between
    epochs, because a window must not be cut.

    Efficiency is a mean over the noise scales that the measurements allow, so the total jumps as far as they support.
    As for the split, a change has to gain more than it costs while it holds. While a worker has been seen at one size
    only, the constant part of its time is a guess; where no larger total seems better, the next one is then a probe:
    1.5 times as large or, if that would waste more than a fifth of the samples, smaller by the same factor.

    Args:
        max_total_batch_size: greatest total, ``>= 1``.
        min_total_batch_size: least total, ``>= 1``, ``None`` for the smallest that the workers' bounds allow.
        hysteresis: least predicted gain in goodput for which the total is changed, as a share, 0 to 1.
        min_steps: observed steps between two changes of the total, ``>= 1``.
        model: planner of the split, with the time models.
        initial_total: ``B_0``, the total against which efficiency counts; set when training begins.
        micro_batch_limit: samples of all workers together in one micro-batch if no bounds are known, ``None`` for no
            limit.
        table: candidates of the last decision.
        steps: observed steps since the total changed.
        accumulation: micro-batches of the total in use.
        moves_total: tells the engine that a resumed run continues with the total that it reached.

    Example:
        >>> from lightning_hetero.core.noise.running import RunningNoiseScale
        >>> import numpy as np
        >>> noise = RunningNoiseScale().update(trace=900.0, global_sq_norm=23.5, total_batch_size=40, steps=50)
        >>> context = PlanContext(40, ("a", "b"), (1, 1), noise=noise)
        >>> sizes = np.array([[20.0, 20.0], [30.0, 10.0]] * 20)
        >>> zeros = np.zeros_like(sizes)
        >>> seconds = 0.05 + sizes * [0.001, 0.003]
        >>> obs = StepObservations(sizes, zeros, seconds, zeros, zeros, zeros, zeros)
        >>> planner, proposal = GoodputPlanner(400, initial_total=40).decide(obs, BatchPlan(40, (30, 10)), context)
        >>> proposal.plan.total_batch_size, proposal.plan.local_batch_sizes
        (249, (187, 62))
    """

    max_total_batch_size: int
    min_total_batch_size: int | None = None
    hysteresis: float = 0.02
    min_steps: int = 4
    model: PerfModelPlanner = field(default_factory=PerfModelPlanner)
    initial_total: int | None = None
    micro_batch_limit: int | None = None
    table: tuple[Candidate, ...] = ()
    steps: int = 0
    accumulation: int = 1
    moves_total: bool = True

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose what the time model's planner proposes."""
        return self.model.initial(context)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict what the time model's planner predicts."""
        return self.model.predict(plan, context)

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose the best total with its optimal split, or a better split of this one."""
        by_model = self.model.decide(observations, current, context)
        model, split = by_model
        planner = replace(
            self, model=model, steps=self.steps + observations.num_steps, accumulation=context.accumulation
        )
        cluster = model.cluster(replace(context, accumulation=1))
        if cluster is None:
            return replace(by_model, planner=planner)
        total = current.total_batch_size * context.accumulation
        windows = planner.windows(total, context)
        times = step_times(cluster, windows, context.min_local, context.max_local, context.multiple)
        planner = replace(planner, table=planner.candidates(times, context))
        now = planner.current(planner.table, total)
        if planner.steps < self.min_steps or now is None:
            return replace(by_model, planner=planner)
        chosen, explores = choose_total(planner.table, total, hysteresis=self.hysteresis), False
        if chosen.total_batch_size <= total:  # without a step's constant part, no total seems too small
            probe = _probe(planner.table, now)
            explores = _tells(model, _plan(model, probe, context), context)
            chosen = probe if explores else chosen
        if chosen.total_batch_size == total or not (explores or planner._pays(chosen, now, model, context)):
            return replace(by_model, planner=planner)
        plan, gain = _plan(model, chosen, context), chosen.goodput / now.goodput - 1.0
        there = replace(context, total_batch_size=plan.total_batch_size, accumulation=chosen.accumulation)
        plan = replace(plan, step_time_error=model.error(plan, there))
        why = "to learn the constant part of a step" if explores else f"goodput {gain:+.0%}"
        reason = f"total batch {total} -> {plan.total_batch_size * chosen.accumulation}: {why}, {self.ground(context)}"
        planner, soon = replace(planner, steps=0, accumulation=chosen.accumulation), gain > SOON
        return replace(by_model, planner=planner, proposal=Proposal(plan, reason), soon=explores or soon, kept=None)

    def _pays(self, chosen: Candidate, now: Candidate, model: PerfModelPlanner, context: PlanContext) -> bool:
        """Return whether a total gains more while it holds than the change costs, by the same rule as for the split."""
        gain = 1.0 - now.goodput / chosen.goodput
        return gain > 0.0 and model.pays(gain, now.step_time, context)

    def efficiencies(self, totals: Array, context: PlanContext) -> Array:
        """Return the efficiency of a sample at each total, relative to the initial one; NaN keeps the total."""
        if context.noise is None or self.initial_total is None:
            return np.full(totals.shape, math.nan)
        return context.noise.efficiency(totals, self.initial_total)

    def ground(self, context: PlanContext) -> str:
        """Return the grounds of a change of the total, for the log."""
        scale = math.nan if context.noise is None else context.noise.noise_scale
        return f"at a noise scale of {rounded(scale)} samples"

    def windows(self, total: int, context: PlanContext) -> tuple[Window, ...]:
        """Return the current total and every one that may follow it, each with the number of its micro-batches.

        Args:
            total: total that runs now.
            context: bounds, and whether the number of micro-batches may change.
        """
        least = sum(context.min_local) * (1 if context.epoch_begins else context.accumulation)
        low, high = max(least, self.min_total_batch_size or 1), self.max_total_batch_size
        limit = self.micro_batch_limit if context.max_local is None else sum(context.max_local)
        count = None if context.epoch_begins else context.accumulation
        grid = () if high < low else candidate_totals(low, high)
        full: Sequence[int] = ()
        if limit is not None and -(-low // limit) <= high // limit:
            full = [limit * number for number in candidate_totals(-(-low // limit), high // limit)]
        parts = [in_equal_parts(b, limit, count, context.multiple) for b in (*grid, *full)]
        return windows_of(
            [total, *[b for b in parts if b >= low]],
            min_local=context.min_local,
            max_local=context.max_local,
            micro_batch_limit=limit,
            accumulation=count,
        )

    def candidates(self, times: Mapping[Window, float], context: PlanContext) -> tuple[Candidate, ...]:
        """Return the goodput of candidates whose step times are known.

        Args:
            times: seconds of an optimizer step, by total and number of micro-batches.
            context: noise.
        """
        return goodput_of(times, self.efficiencies(np.array([float(total) for total, _ in times]), context))

    def current(self, table: Sequence[Candidate], total: int) -> Candidate | None:
        """Return the candidate that runs now, ``None`` before there is a table."""
        return next(iter([candidate for candidate in table if candidate.total_batch_size == total]), None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the time model and of the total."""
        return {
            "model": self.model.state_dict(),
            "initial_total": self.initial_total,
            "micro_batch_limit": self.micro_batch_limit,
            "steps": self.steps,
            "accumulation": self.accumulation,
        }

    def loaded(self, state: dict[str, Any]) -> "GoodputPlanner":
        """Return the planner restored from :meth:`state_dict`."""
        return replace(
            self,
            model=self.model.loaded(state["model"]),
            initial_total=state["initial_total"],
            micro_batch_limit=state["micro_batch_limit"],
            steps=int(state["steps"]),
            accumulation=int(state["accumulation"]),
        )


def _plan(model: PerfModelPlanner, chosen: Candidate, context: PlanContext) -> BatchPlan:
    """Return the best split of one micro-batch of a candidate."""
    total = chosen.total_batch_size // (chosen.accumulation * context.multiple) * context.multiple
    return model.optimum(replace(context, total_batch_size=total, accumulation=chosen.accumulation))


def _tells(model: PerfModelPlanner, plan: BatchPlan, context: PlanContext) -> bool:
    """Return whether the plan gives a second size to a worker that has been seen at one size only."""
    times = model.times.select(context.identities)
    once, here = (times.steps > 0).sum(axis=1) == 1, times.size == np.array(plan.local_batch_sizes)[:, None]
    return bool(np.any(once & ~here.any(axis=1)))


def _probe(table: Sequence[Candidate], now: Candidate) -> Candidate:
    """Return the candidate nearest to ``PROBE`` times the total; a smaller one if that wastes too much."""
    larger = [c for c in table if c.total_batch_size > now.total_batch_size]
    larger = [c for c in larger if c.efficiency >= (1 - MOST_WASTE) * now.efficiency]
    smaller = [c for c in table if c.total_batch_size < now.total_batch_size and not math.isnan(c.efficiency)]
    others, factor = (larger, PROBE) if larger else (smaller, 1 / PROBE)
    distances = [abs(c.total_batch_size / now.total_batch_size - factor) for c in others]
    return others[distances.index(min(distances))] if others else now
