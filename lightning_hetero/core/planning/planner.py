"""The split of the batch by the workers' learned times, and the rule by which it changes (C sec. 3-4).

A sync round takes the times of its steps into the time model, and solves for the split of least step time. The split
changes if the predicted gain is beyond chance, beyond the cost of a change, and believable: what each change gained is
measured, and where that was less than predicted, further gains count less for some hundred steps. Where every worker
has run at one size only, and no split looks better although some workers are faster, the slowest gives one unit to the
fastest: that shows what a sample costs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.batching.plan import BatchPlan, split_text
from lightning_hetero.core.checkpoint_state import check_checksums, with_checksums
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planning.forecast import Forecast, Split, step_ends
from lightning_hetero.core.planning.link_times import LinkTimes
from lightning_hetero.core.planning.worker_times import WorkerTimes, since_jump
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.core.timing.winsorized_mean import winsorize_top, winsorized_mean

Array = npt.NDArray[np.float64]

RECOVERY = 400.0
"""Steps after which doubts about predicted gains have faded to ``1 / e``."""
LEAST_CREDIT = 0.1
"""Share of a predicted gain that counts at least."""
LEAST_GAIN = 0.007
"""Least gain for which the split changes, as a share of a step of mean times."""
TIE = 1e-9
"""Share of a step up to which another split is as good."""
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
        accumulation: micro-batches of a step.
    """

    seconds: float
    error: float
    gain: float
    split: Split
    accumulation: int = 1


@checked_keywords
@dataclass(frozen=True)
class PerfModelPlanner:
    """Time model of each worker, and the split of least step time.

    Args:
        times: of each piece of hardware.
        link: of the all-reduce, by the number of workers.
        steps: steps of this run and of those that it continues.
        trial: newest change of the split, until it is judged.
        credit: share of a predicted gain that counts, 0 to 1, by what earlier changes gained.
        excess: logarithm of the measured over the predicted step time.
        ranks: hardware of the ranks that the trial is about.

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
    trial: Trial | None = None
    credit: float = 1.0
    excess: float = 0.0
    ranks: tuple[str, ...] = ()

    # predictions

    def knows(self, context: PlanContext) -> bool:
        """Return whether any current worker was observed; the others' times are taken from the one most like them."""
        return not set(self.times.names).isdisjoint(context.identities)

    def forecast(self, context: PlanContext) -> Forecast:
        """Return the step times of the current workers, of which one at least was observed."""
        workers = self.times.select(context.identities).guessed(context.capacities)
        return Forecast(workers, self.link.at(len(context.identities)), context)

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Predict the seconds of a step (of a window, under accumulation), which waits for the slowest worker in it."""
        return self._timed(plan.local_batch_sizes, self.forecast(context))[0] if self.knows(context) else None

    def error(self, plan: BatchPlan, context: PlanContext) -> float | None:
        """Return the standard error in seconds of :meth:`predict`."""
        return self._timed(plan.local_batch_sizes, self.forecast(context))[1] if self.knows(context) else None

    def _timed(self, split: Sequence[int], forecast: Forecast) -> tuple[float, float]:
        """Return the predicted seconds of a step, and their standard error."""
        sizes = forecast.sizes(split)
        seconds = forecast.seconds(sizes) * math.exp(self.excess)
        return seconds, seconds * math.hypot(OFF, forecast.error(sizes))

    def cluster(self, context: PlanContext) -> ClusterTimeModel | None:
        """Return the time model of the current ranks as lines (C eq. 7), ``None`` if all of them are unknown.

        They meet the times at the optimal split, and include the time by which steps exceed the model.
        """
        return self._lines(self.forecast(context)) if self.knows(context) else None

    def _lines(self, forecast: Forecast) -> ClusterTimeModel:
        sizes = forecast.sizes(forecast.best)
        lines = forecast.lines(sizes)
        return lines.slowed(self._timed(forecast.best, forecast)[0] / lines.step_time(sizes) - 1.0, 0.0)

    def optimum(self, context: PlanContext) -> BatchPlan:
        """Return the split of least step time, for workers of which one at least was observed."""
        forecast = self.forecast(context)
        return self._planned(forecast.best, forecast)

    def _planned(self, split: Split, forecast: Forecast) -> BatchPlan:
        """Return the plan of a split with its time, and the ranks that slow it down by their minimum alone."""
        context, (seconds, error) = forecast.context, self._timed(split, forecast)
        plan = BatchPlan(context.total_batch_size, split, step_time=seconds, step_time_error=error)
        slow = int(forecast.finish(forecast.sizes(split)).argmax())
        if split[slow] > forecast.bounds[0][slow]:
            return plan
        found = solve_optperf(
            self._lines(forecast),
            context.total_batch_size,
            min_local=context.min_local,
            max_local=context.max_local,
            multiple=context.multiple,
        )
        return replace(plan, leave_out=found.leave_out, step_time_without=found.step_time_without)

    # learning

    def observe(self, seen: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """Return the planner that has seen the observations."""
        if seen.num_steps == 0:
            return self
        seen = _since_jump(seen)
        planner = self._learned(seen, context)
        return planner._judged(seen, planner.forecast(context))

    def _learned(self, seen: StepObservations, context: PlanContext) -> "PerfModelPlanner":
        """Return the planner with the times of one step or more; doubts about gains fade with the steps."""
        elapsed = float(max(context.elapsed or 0, seen.num_steps))
        workers = self.times.select(context.identities)
        jumped, since = np.zeros(len(context.identities), dtype=bool), elapsed
        for sizes, own in seen.splits():
            workers = workers.observe(np.maximum(sizes, 1.0), seen.outside_backward[own], seen.backward[own], since)
            jumped, since = jumped | workers.jumped, 0.0
        planner = replace(
            self,
            times=self.times.merge(replace(workers, jumped=jumped)),
            link=self.link.observe(seen, context.accumulation),
            ranks=context.identities,
            steps=self.steps + elapsed,
            credit=1.0 - (1.0 - self.credit) * math.exp(-elapsed / RECOVERY),
        )
        return replace(planner, trial=None) if jumped.any() or self.ranks != context.identities else planner

    def _judged(self, seen: StepObservations, forecast: Forecast) -> "PerfModelPlanner":
        """Return the planner that has compared the newest steps with their prediction, and with those of a trial."""
        seen = seen.rows(slice(seen.splits()[-1][1].start, None))
        split = tuple(seen.local_batch_sizes[-1].astype(int).tolist())
        planner = self
        took = seen.step_time[np.isfinite(seen.step_time).all(axis=1)].max(axis=1)
        if len(took):
            excess = math.log(max(winsorized_mean(took), 1e-9) / forecast.seconds(forecast.sizes(split)))
            if excess > LEAST_EXCESS:  # what is far shorter than its slowest worker is no step
                followed = self.excess + EXCESS_GAIN * (excess - self.excess)
                planner = replace(planner, excess=min(followed, MOST_EXCESS))
        trial, accumulation = self.trial, forecast.context.accumulation
        if trial is not None and (sum(trial.split), trial.accumulation) != (sum(split), accumulation):
            return replace(planner, trial=None)
        if trial is None or trial.split != split or seen.num_steps < 3:
            return planner
        seconds, error = self._measured(seen, accumulation)
        gained = 1.0 - seconds / trial.seconds + 2.0 * math.hypot(error, trial.error) / trial.seconds
        drifting = float(forecast.workers.drifting.mean())
        kept = min(max(gained / trial.gain, -1.0), 1.0) * (1.0 - drifting) + drifting
        return replace(planner, trial=None, credit=max(0.5 * (self.credit + kept), LEAST_CREDIT))

    def _measured(self, seen: StepObservations, accumulation: int) -> tuple[float, float]:
        """Return the mean seconds of a step by its slowest worker, and their error."""
        link = self.link.at(seen.forward.shape[1])
        ends = step_ends(seen.outside_backward, seen.backward, link, accumulation)
        took = winsorize_top(np.maximum(*ends).max(axis=1))  # odd steps must not excuse a split that gains nothing
        return float(took.mean()), float(took.std()) / len(took) ** 0.5

    # decisions

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose the optimum by what an earlier run learned of this hardware; equal sizes if all of it is new."""
        if not self.knows(context):
            return None
        new = [str(rank) for rank, name in enumerate(context.identities) if name not in self.times.names]
        by = "peak FLOP/s" if context.capacities else "what the others take"
        more = f"; rank {_few(new)} is new and starts by {by}" if new else ""
        return Proposal(self.optimum(context), f"from the time models of an earlier run{more}")

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        """Learn from the observations; propose another split if it is believed to gain more than it costs."""
        seen = _since_jump(observations)
        planner = self._learned(seen, context) if seen.num_steps else self
        if not set(context.identities) <= set(planner.times.names):
            return Decision(planner, kept="too few observations: not every worker's time is known")
        forecast = planner.forecast(context)
        planner = planner._judged(seen, forecast) if seen.num_steps else planner
        decision = planner._decide(seen, current, forecast, first=not self.knows(context))
        moving = float(forecast.workers.drifting.mean()) > 0.5
        return replace(decision, error=planner._timed(current.local_batch_sizes, forecast)[1], moving=moving)

    def _decide(self, seen: StepObservations, current: BatchPlan, forecast: Forecast, *, first: bool) -> Decision:
        context, here, best = forecast.context, current.local_batch_sizes, forecast.best
        running, planned = forecast.sizes(here), forecast.sizes(best)
        scaled = running * (context.total_batch_size / current.total_batch_size)
        step = forecast.seconds(scaled) * math.exp(self.excess)
        gain = 1.0 - forecast.seconds(planned) / forecast.seconds(scaled)
        apart = 1.0 - float(forecast.finish(planned).max() / forecast.finish(scaled).max())  # of mean times
        worth, least = self.credit * gain, max(LEAST_GAIN, self._chance(forecast, running))
        believed = f", {self.credit:.0%} of which is believed" if self.credit < 0.995 else ""
        shown = split_text(best, by_cost=current.cost is not None, most=3)
        other = f"{shown} would take {max(gain, 0.0):.1%} less{believed}"
        if self.credit * apart > least and gain > 0.0:
            if worth < context.hysteresis:
                return Decision(self, kept=f"the predicted gain is below hysteresis={context.hysteresis:g}: {other}")
            if not self.pays(worth, step, context):
                return Decision(self, kept=_costs_too_much(other, step))
            rows, trial = (seen.local_batch_sizes == running).all(axis=1), None
            if rows.sum() >= 3 and current.total_batch_size == context.total_batch_size:
                before = self._measured(seen.rows(rows), context.accumulation)
                trial = Trial(*before, gain, best, context.accumulation)
            change = self._change(self._why(forecast, first=first), here, best, forecast)
            return Decision(replace(self, trial=trial), change, soon=gain > SOON)
        if apart > TIE:
            kept = f"too little is known of the workers: {other}, and {least:.1%} may be luck"
            if least == LEAST_GAIN or gain <= 0.0:
                kept = f"there is too little to gain: {other}"
            return Decision(self, kept=kept, soon=gain > SOON and self.steps < YOUNG)
        if (probe := self._probe(forecast, running, step)) is None:
            return Decision(self, kept=_why_optimal(current, forecast))
        why = "a sample moves from the slowest to the fastest, to learn what it costs"
        costs = forecast.seconds(forecast.sizes(probe)) >= forecast.seconds(scaled)  # then it is undone early
        return Decision(replace(self, trial=None), self._change(why, here, probe, forecast), soon=costs)

    def _change(self, why: str, here: Split, split: Split, forecast: Forecast) -> Proposal:
        before, then = (forecast.seconds(forecast.sizes(one)) * math.exp(self.excess) for one in (here, split))
        takes = f"{abs(1.0 - then / before):.1%} {'less' if then <= before else 'more'}"
        reason = f"{why}: step {before * 1e3:.1f} -> {then * 1e3:.1f} ms ({takes})"
        return Proposal(self._planned(split, forecast), reason)

    def pays(self, gain: float, step_time: float, context: PlanContext) -> bool:
        """Return whether a gain saves more than the change costs, if it holds as long again as the run so far.

        Args:
            gain: share of a step.
            step_time: seconds of a step.
            context: with the cost of a change.
        """
        return gain * step_time * max(self.steps, HORIZON) > (context.change_cost or 0.0)

    def _chance(self, forecast: Forecast, sizes: Array) -> float:
        """Return the gain that chance alone pretends: how far the unluckiest of equal workers seems behind."""
        workers = forecast.workers
        free = max(float(workers.squares[:, 1].sum()), 1.0)
        unlucky = ((2.0 * math.log(len(sizes))) ** 0.5 + LUCK) * (1.0 + 9.0 / free)  # noise itself is not sure
        if np.ptp(sizes) > forecast.context.multiple:  # equal workers keep equal sizes; others are misled by little
            unlucky *= UNEQUAL * (1.0 - float(workers.drifting.mean()))  # no later round knows more of drifts
        return float(unlucky * workers.errors(sizes)[forecast.finish(sizes).argmax()])

    def _probe(self, forecast: Forecast, sizes: Array, step: float) -> Split | None:
        """Return the split with one unit moved from the slowest worker to the fastest; ``None`` if two sizes ran."""
        context, workers, (low, high), finish = (
            forecast.context,
            forecast.workers,
            forecast.bounds,
            forecast.finish(sizes),
        )
        slow, fast = int(finish.argmax()), int(np.where(sizes < high, finish, np.inf).argmin())
        if (workers.steps > 0).sum(axis=1).max() > 1 or sizes.sum() != context.total_batch_size:
            return None
        if sizes[slow] <= low[slow] or sizes[fast] >= high[fast]:
            return None
        most = 1.0 - float(finish.mean() / finish.max())  # about what another split may gain
        if most <= context.hysteresis or not self.pays(most, step, context):
            return None
        errors = workers.errors(sizes) * finish
        if finish[slow] - finish[fast] < PROBE * math.hypot(errors[slow], errors[fast]):
            return None
        moved = sizes.copy()
        moved[[slow, fast]] += [-context.multiple, context.multiple]
        risk = float(forecast.finish(moved).max() / finish.max()) - 1.0
        return tuple(moved.astype(int).tolist()) if risk < most else None

    def _why(self, forecast: Forecast, *, first: bool) -> str:
        if jumped := [str(rank) for rank in np.flatnonzero(forecast.workers.jumped)]:
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
        }
        return with_checksums(state)

    def loaded(self, state: Mapping[str, Any]) -> "PerfModelPlanner":
        """Return the planner restored from :meth:`state_dict`.

        Raises:
            DamagedCheckpointError: if the state has changed since it was saved.
        """
        check_checksums(state, "the time models")
        return replace(
            self,
            times=WorkerTimes.from_state_dict(state["times"]),
            link=LinkTimes.from_state_dict(state["link"]),
            steps=float(state["steps"]),
            credit=float(state["credit"]),
            excess=float(state["excess"]),
        )


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


def _why_optimal(plan: BatchPlan, forecast: Forecast) -> str:
    (low, high), sizes = forecast.bounds, plan.local_batch_sizes
    held = [str(i) for i, b in enumerate(sizes) if b in (low[i], high[i])]
    if held and len(low) > 1:
        return f"bounds hold: rank {_few(held)} at its minimum or maximum; the split is the optimum"
    if max(sizes) - min(sizes) <= forecast.context.multiple:
        return f"no worker is known to be faster: equal {'sizes are' if plan.cost is None else 'work is'} the optimum"
    return "the optimum runs already: no other split is predicted to be faster"
