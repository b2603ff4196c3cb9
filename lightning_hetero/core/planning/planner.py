"""The split of the batch by the workers' learned times, and the rule by which it changes (C sec. 3-4).

A sync round takes the times of its steps into the time model, and solves for the split of least step time. The split
changes if the predicted gain is beyond chance, beyond the cost of a change, and believable: what each change gained is
measured, and where that was less than predicted, further gains count less for some hundred steps. A split that has run
and is faster is gone back to. Where every worker has run at one size only, and no split looks better although some
workers are faster, the slowest gives one unit to the fastest: that shows what a sample costs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.finish_lines import check_bounds
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan, split_text
from lightning_hetero.core.checkpoint_state import check_checksums, with_checksums
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.link_times import LinkTimes
from lightning_hetero.core.planning.settings import DEFAULTS, PlannerSettings
from lightning_hetero.core.planning.split import Curve, finish_times, solve
from lightning_hetero.core.planning.worker_times import WorkerTimes, since_jump
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.timing.expected_maximum import expected_maximum
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels
from lightning_hetero.core.timing.winsorized_mean import winsorize_top, winsorized_mean

Array = npt.NDArray[np.float64]
Split = tuple[int, ...]

SPLITS = 8
"""Splits that are remembered as measured."""
RECOVERY = 400.0
"""Steps after which doubts about predicted gains have faded to ``1 / e``."""
LEAST_CREDIT = 0.1
"""Share of a predicted gain that counts at least."""
PROBE = 4.0
"""Standard errors by which the slowest worker has to differ from the fastest for a probe."""
UNEQUAL = 0.5
"""Share of what chance pretends that counts where sizes differ already."""
EXCESS_GAIN, LEAST_EXCESS, MOST_EXCESS = 0.3, -0.3, 1.0
"""Weight of the newest round in the excess of measured over predicted steps, and the limits of its logarithm."""
OFF = 0.005
"""Relative error of a prediction that more steps do not reduce."""
LUCK = 1.6
"""Standard errors beyond the expected ones by which the unluckiest of equal workers may seem behind."""
SHORT_STEP = 0.015
"""Seconds of a step below which workers can hardly be balanced."""
SOON = 0.02
"""Gain from which on the next round should come early, since more is likely to follow."""
YOUNG = 64.0
"""Steps of a run until which the next round also comes early to make sure of such a gain."""
HORIZON = 256.0
"""Steps for which a split is assumed to hold in a young run; later on, as many as the run has had."""


class Trial(NamedTuple):
    """A change of the split that has to prove itself.

    Args:
        seconds: measured mean seconds of a step before it.
        error: their standard error.
        gain: predicted gain, as a share.
        split: split that it changed to.
    """

    seconds: float
    error: float
    gain: float
    split: Split


@checked_keywords
@dataclass(frozen=True)
class PerfModelPlanner:
    """Time model of each worker, and the split of least step time.

    Args:
        times: of each piece of hardware.
        link: of the all-reduce, by the number of workers.
        steps: steps of this run and of those that it continues.
        splits: splits that ran since a speed last jumped, newest last.
        trial: newest change of the split, until it is judged.
        credit: share of a predicted gain that counts, 0 to 1, by what earlier changes gained.
        excess: logarithm of the measured over the predicted step time.
        ranks: hardware of the ranks that ran the splits.
        settings: of model and rule.

    Example:
        >>> context = PlanContext(40, ("a", "b"), (1, 1))
        >>> sizes = np.full((5, 2), 20.0)
        >>> zeros = np.zeros_like(sizes)
        >>> seen = StepObservations(sizes, zeros, sizes * [0.001, 0.003], zeros, zeros, zeros, zeros)
        >>> planner, proposal = PerfModelPlanner().decide(seen, BatchPlan(40, (20, 20)), context)
        >>> proposal.plan.local_batch_sizes
        (33, 7)
    """

    moves_total: ClassVar[bool] = False
    times: WorkerTimes = field(default_factory=lambda: WorkerTimes.of(()))
    link: LinkTimes = LinkTimes()
    steps: float = 0.0
    splits: tuple[Split, ...] = ()
    trial: Trial | None = None
    credit: float = 1.0
    excess: float = 0.0
    ranks: tuple[str, ...] = ()
    settings: PlannerSettings = DEFAULTS

    def __post_init__(self) -> None:
        if self.times.settings != self.settings:
            object.__setattr__(self, "times", replace(self.times, settings=self.settings))

    # predictions

    def knows(self, context: PlanContext) -> bool:
        """Return whether any current worker was observed; the others' times are taken from the one most like them."""
        return not set(self.times.names).isdisjoint(context.identities)

    def _workers(self, context: PlanContext) -> WorkerTimes:
        return self.times.select(context.identities).guessed(context.capacities)

    def _ends(self, a: Array, p: Array, context: PlanContext) -> tuple[Array, Array]:
        """Return when steps end with computing and with the all-reduce as the bottleneck (C eq. 7), by ``a`` and ``P``.

        Of the ``n`` micro-batches of a window the last is synchronized; the others count as time before it.
        """
        n, (gamma, t_o, t_u) = context.accumulation, self.link.at(len(context.identities))
        return n * (a + p) + t_u, n * a + (n - 1 + gamma) * p + t_o + t_u

    def _curves(self, workers: WorkerTimes, context: PlanContext) -> list[Curve]:
        at, (a, p) = workers.curves
        return [(at, ends) for ends in self._ends(a, p, context)]

    def _best(self, context: PlanContext) -> Split:
        curves = self._curves(self._workers(context), context)
        return tuple(solve(curves, *_bounds(context), context.total_batch_size, context.multiple).tolist())

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict the seconds of a step (of a window, under accumulation), which waits for the slowest worker in it."""
        if not self.knows(context):
            return None
        workers, sizes = self._workers(context), _run(plan.local_batch_sizes, context)
        single = workers.parts(sizes).sum(axis=1) * workers.jitter * context.accumulation
        return expected_maximum(finish_times(self._curves(workers, context), sizes), single)[0] * math.exp(self.excess)

    def error(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Return the standard error in seconds of :meth:`predict`."""
        if (predicted := self.predict(plan, context)) is None:
            return None
        errors = self._workers(context).errors(_run(plan.local_batch_sizes, context))
        return predicted * math.hypot(OFF, 1.25 * float(errors.max()))  # of several, the largest is a little more

    def cluster(self, context: PlanContext) -> ClusterTimeModel | None:
        """Return the time model of the current ranks as lines (C eq. 7), ``None`` if all of them are unknown.

        They meet the times at the optimal split, and include the time by which steps exceed the model.
        """
        if not self.knows(context):
            return None
        plan = BatchPlan(context.total_batch_size, self._best(context))
        sizes = np.array(plan.local_batch_sizes, dtype=float)
        nodes, link = NodeModels(self._workers(context).lines(sizes)), self.link.at(len(context.identities))
        model = ClusterTimeModel(nodes, *link).accumulated(context.accumulation)
        return model.slowed((self.predict(plan, context) or 0.0) / max(model.step_time(sizes), 1e-12) - 1.0, 0.0)

    def optimum(self, context: PlanContext) -> BatchPlan:
        """Return the split of least step time, for workers of which one at least was observed."""
        return self._planned(self._best(context), context)

    def _planned(self, split: Split, context: PlanContext) -> BatchPlan:
        """Return the plan of a split with its time, and the ranks that slow it down by their minimum alone."""
        plan = BatchPlan(context.total_batch_size, split)
        plan = replace(plan, step_time=self.predict(plan, context), step_time_error=self.error(plan, context))
        finish = finish_times(self._curves(self._workers(context), context), _run(split, context))
        slow = int(finish.argmax())
        lines = self.cluster(context) if split[slow] <= _bounds(context)[0][slow] else None
        if lines is None:
            return plan
        bounds: dict[str, Any] = {name: getattr(context, name) for name in ("min_local", "max_local", "multiple")}
        found = solve_optperf(lines, context.total_batch_size, **bounds)
        return replace(plan, leave_out=found.leave_out, step_time_without=found.step_time_without)

    # learning

    def observe(self, seen: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """Return the planner that has seen the observations."""
        if seen.num_steps == 0:
            return self
        elapsed = float(max(context.elapsed or 0, seen.num_steps))
        link, seen = self.link.observe(seen, context.accumulation), _since_jump(seen)
        splits = seen.splits()
        workers = self.times.select(context.identities)
        jumped, since = np.zeros(len(context.identities), dtype=bool), elapsed
        for sizes, own in splits:
            workers = workers.observe(np.maximum(sizes, 1.0), seen.outside_backward[own], seen.backward[own], since)
            jumped, since = jumped | workers.jumped, 0.0
        planner = replace(
            self,
            times=self.times.merge(replace(workers, jumped=jumped)),
            link=link,
            ranks=context.identities,
            steps=self.steps + elapsed,
            credit=self.credit + (1.0 - self.credit) * (1.0 - math.exp(-elapsed / RECOVERY)),
        )
        if jumped.any() or self.ranks != context.identities:
            planner = replace(planner, splits=(), trial=None)
        return planner._judge(seen.rows(slice(splits[-1][1].start, None)), context)

    def _judge(self, seen: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """Return the planner that has compared the newest steps with their prediction, and with those of a trial."""
        split = tuple(seen.local_batch_sizes[-1].astype(int).tolist())
        seconds, error = self._measured(seen, context)
        took = seen.step_time[np.isfinite(seen.step_time).all(axis=1)].max(axis=1)
        planner = replace(self, splits=(*(one for one in self.splits if one != split), split)[-SPLITS:])
        if len(took):
            expected = self.predict(BatchPlan(sum(split), split), context) or 1.0
            off = math.log(max(winsorized_mean(took), 1e-9) / expected)
            if off + self.excess > LEAST_EXCESS:  # what is far shorter than its slowest worker is no step
                planner = replace(planner, excess=min(self.excess + EXCESS_GAIN * off, MOST_EXCESS))
        trial = self.trial
        if trial is not None and sum(trial.split) != sum(split):
            return replace(planner, trial=None)
        if trial is None or trial.split != split or seen.num_steps < 3:
            return planner
        gained = 1.0 - seconds / trial.seconds + 2.0 * math.hypot(error, trial.error) / trial.seconds
        drifting = float(self.times.select(context.identities).drifting.mean())
        kept = min(max(gained / trial.gain, -1.0), 1.0) * (1.0 - drifting) + drifting
        return replace(planner, trial=None, credit=max(0.5 * (self.credit + kept), LEAST_CREDIT))

    def _measured(self, seen: StepObservations, context: PlanContext) -> tuple[float, float]:
        """Return the mean seconds of a micro-batch of its slowest worker, and their error."""
        one = replace(context, accumulation=1)  # so that it can be compared when the number of micro-batches changes
        took = np.maximum(*self._ends(seen.outside_backward, seen.backward, one)).max(axis=1)
        took = winsorize_top(took[:, None])  # odd steps must not excuse a split that gains nothing
        return float(took.mean()), float(took.std()) / len(took) ** 0.5

    # decisions

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose the optimum by what an earlier run learned of this hardware; equal sizes if all of it is new."""
        if not self.knows(context):
            return None
        plan = self.optimum(context)
        new = [str(rank) for rank, name in enumerate(context.identities) if name not in self.times.names]
        by = "peak FLOP/s" if context.capacities else "what the others take"
        more = f"; rank {_few(new)} is new and starts by {by}" if new else ""
        return Proposal(plan, f"from the time models of an earlier run{more}")

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose another split if it is believed to gain more than it costs."""
        planner = self.observe(observations, context)
        if not set(context.identities) <= set(planner.times.names):
            return Decision(planner, kept="too few observations: not every worker's time is known")
        decision = planner._decide(observations, current, context, first=not self.knows(context))
        moving = float(planner.times.select(context.identities).drifting.mean()) > 0.5
        return replace(decision, error=planner.error(current, context), moving=moving)

    def _decide(self, seen: StepObservations, current: BatchPlan, context: PlanContext, *, first: bool) -> Decision:
        workers, (low, high) = self._workers(context), _bounds(context)
        total, running = context.total_batch_size, _run(current.local_batch_sizes, context)
        scaled = running * (total / current.total_batch_size)
        curves = self._curves(workers, context)
        now = float(finish_times(curves, scaled).max())

        def gain(split: Sequence[int]) -> float:
            return 1.0 - float(finish_times(curves, _run(split, context)).max()) / now

        best = self._best(context)
        least = max(self.settings.least_gain, self._chance(workers, scaled, context.multiple))
        # splits that ran count in full, another one by what such predictions were worth
        here = current.local_batch_sizes
        ran = [one for one in self.splits if one != here and len(one) == len(here) and sum(one) == total]
        ran = [one for one in ran if ((low <= one) & (one <= high) & (np.mod(one, context.multiple) == 0)).all()]
        offers = [(gain(split), split, False) for split in ran]
        if best not in ran:
            offers.append((self.credit * gain(best), best, True))
        worth, split, new = max(offers)
        shown = split_text(split, by_cost=current.cost is not None, most=3)
        other = f"{shown} would take {max(gain(split), 0.0):.1%} less"
        if worth > least:
            if worth < context.hysteresis:
                return Decision(self, kept=f"the predicted gain is below hysteresis={context.hysteresis:g}: {other}")
            if not self.pays(worth, now, context):
                return Decision(self, kept=_costs_too_much(other, now))
            why = self._why(workers, first=first) if new else "a split that ran before is faster"
        elif best != here:
            few = f"too little is known of the workers: {other}, and {least:.1%} may be luck"
            return Decision(self, kept=few, soon=gain(best) > SOON and self.steps < YOUNG)
        elif (probe := self._probe(workers, curves, running, low, high, context)) is not None:
            split, new, why = probe, False, "a sample moves from the slowest to the fastest, to learn what it costs"
        else:
            return Decision(self, kept=_why_optimal(current, context))
        promised, trial = gain(split), None
        seen = _since_jump(seen)
        rows = (seen.local_batch_sizes == running).all(axis=1)
        if new and rows.sum() >= 3 and current.total_batch_size == total:
            trial = Trial(*self._measured(seen.rows(rows), context), promised, split)
        plan, before = self._planned(split, context), self.predict(current, context) or 1e-12
        then = plan.step_time or 0.0
        takes = f"{abs(1.0 - then / before):.1%} {'less' if then <= before else 'more'}"
        reason = f"{why}: step {before * 1e3:.1f} -> {then * 1e3:.1f} ms ({takes})"
        soon = promised > SOON if new else promised <= 0.0  # a probe that costs time is undone early
        return Decision(replace(self, trial=trial), Proposal(plan, reason), soon=soon)

    def pays(self, gain: float, step_time: float, context: PlanContext) -> bool:
        """Return whether a gain saves more than the change costs, if it holds as long again as the run so far.

        Args:
            gain: share of a step.
            step_time: seconds of a step.
            context: with the cost of a change.
        """
        return gain * step_time * max(self.steps, HORIZON) > (context.change_cost or 0.0)

    def _chance(self, workers: WorkerTimes, sizes: Array, unit: int) -> float:
        """Return the gain that chance alone pretends: how far the unluckiest of equal workers seems behind."""
        free = max(float(workers.squares[:, 1].sum()), 1.0)
        unlucky = ((2.0 * math.log(len(sizes))) ** 0.5 + LUCK) * (1.0 + 9.0 / free)  # noise itself is not sure
        if np.ptp(sizes) > unit:  # equal workers keep equal sizes, however noisy; others are misled by little
            unlucky *= UNEQUAL * (1.0 - float(workers.drifting.mean()))  # no later round knows more of drifts
        return float(self.settings.doubt * unlucky * np.median(workers.errors(sizes)))

    def _probe(
        self, workers: WorkerTimes, curves: Sequence[Curve], sizes: Array, low: Array, high: Array, context: PlanContext
    ) -> Split | None:
        """Return the split with one unit moved from the slowest worker to the fastest; ``None`` if two sizes ran."""
        finish = finish_times(curves, sizes)
        slow, fast = int(finish.argmax()), int(np.where(sizes < high, finish, np.inf).argmin())
        if (workers.steps > 0).sum(axis=1).max() > 1 or sizes[slow] <= low[slow] or sizes[fast] >= high[fast]:
            return None
        most = 1.0 - float(finish.mean() / finish.max())  # about what another split may gain
        if most <= context.hysteresis or not self.pays(most, float(finish.max()), context):
            return None
        errors = workers.errors(sizes) * finish
        if finish[slow] - finish[fast] < PROBE * math.hypot(errors[slow], errors[fast]):
            return None
        moved = sizes.copy()
        moved[[slow, fast]] += [-context.multiple, context.multiple]
        risk = float(finish_times(curves, moved).max() / finish.max()) - 1.0
        return tuple(moved.astype(int).tolist()) if risk < most else None

    def _why(self, workers: WorkerTimes, *, first: bool) -> str:
        if jumped := [str(rank) for rank in np.flatnonzero(workers.jumped)]:
            return f"speed of rank {_few(jumped)} changed"
        return "first split, by measured speed" if first else "optimum of the time model"

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the time models by hardware identity, and the cluster's own times."""
        state = {
            "steps": float(self.steps),
            "credit": float(self.credit),
            "excess": float(self.excess),
            "times": self.times.state_dict(),
            "link": self.link.state_dict(),
            "splits": [list(split) for split in self.splits],
            "ranks": list(self.ranks),
            "trial": self.trial and list(self.trial),
        }
        return with_checksums(state)

    def loaded(self, state: Mapping[str, Any]) -> "PerfModelPlanner":
        """Return the planner restored from :meth:`state_dict`.

        Raises:
            DamagedCheckpointError: if the state has changed since it was saved.
        """
        check_checksums(state, "the time models")
        trial = state["trial"]
        return replace(
            self,
            times=WorkerTimes.from_state_dict(state["times"], self.settings),
            link=LinkTimes.from_state_dict(state["link"]),
            splits=tuple(tuple(map(int, split)) for split in state["splits"]),
            ranks=tuple(state["ranks"]),
            trial=None if trial is None else Trial(trial[0], trial[1], trial[2], tuple(trial[3])),
            steps=float(state["steps"]),
            credit=float(state["credit"]),
            excess=float(state["excess"]),
        )


def _run(split: Sequence[int], context: PlanContext) -> Array:
    """Return the samples that each worker runs: at least its minimum, which counts with weight 0 if its size is 0."""
    return np.array(np.maximum(split, context.min_local), dtype=float)


def _bounds(context: PlanContext) -> tuple[Array, Array]:
    """Return the least and greatest sizes, in whole multiples.

    Raises:
        ValueError: if they do not allow the total.
    """
    workers, total, unit = len(context.identities), context.total_batch_size, context.multiple
    low, high = check_bounds(workers, total, context.min_local, context.max_local, unit)
    return low * unit, high * unit


def _since_jump(seen: StepObservations) -> StepObservations:
    """Return the steps since a speed last jumped: what is over by now says nothing about the next ones."""
    own = seen.splits()[-1][1] if seen.num_steps else slice(0, 0)
    jump = since_jump(seen.compute[own])
    return seen.rows(slice(own.start + jump, None)) if jump else seen


def _few(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:3]) + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")


def _costs_too_much(other: str, step_time: float) -> str:
    if step_time < SHORT_STEP:
        return f"steps are too short to balance: they take {step_time * 1e3:.1f} ms, {other}; a larger batch helps"
    return f"a change would cost more than it saves: {other}"


def _why_optimal(plan: BatchPlan, context: PlanContext) -> str:
    (low, high), sizes = _bounds(context), plan.local_batch_sizes
    held = [str(i) for i, b in enumerate(sizes) if b in (low[i], high[i])]
    if held and len(low) > 1:
        return f"bounds hold: rank {_few(held)} at its minimum or maximum; the split is the optimum"
    if max(sizes) - min(sizes) <= context.multiple:
        return f"no worker is known to be faster: equal {'sizes are' if plan.cost is None else 'work is'} the optimum"
    return "the optimum runs already: no other split is predicted to be faster"
