"""Predictions of steps, each made before the steps that it is about, and compared with what they took."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations

__all__ = ["UNFORESEEN", "Foresight", "Predictions"]

Predicted = tuple[float, float]
"""Predicted seconds of a step, and their standard error; NaN if unknown."""
UNKNOWN: Predicted = (math.nan, math.nan)


@dataclass(frozen=True)
class Foresight:
    """Prediction of a sync round for the steps that follow it, as long as the plan stays.

    A prediction by a model that has learned from the same steps would only show how well the model fits them.

    Args:
        plan: plan that runs, ``None`` before the first round.
        accumulation: micro-batches of a step.
        predicted: seconds of a step, and their standard error.

    Example:
        >>> even, faster = BatchPlan(8, (4, 4)), BatchPlan(8, (6, 2), step_time=0.25)
        >>> foresight = Foresight(even, 1, (0.3, 0.01))
        >>> foresight.of(even, 1), foresight.of(faster, 1)
        ((0.3, 0.01), (0.25, nan))
    """

    plan: BatchPlan | None = None
    accumulation: int = 1
    predicted: Predicted = UNKNOWN

    def of(self, plan: BatchPlan, accumulation: int) -> Predicted:
        """Return what was predicted of the steps of a plan; if it began after the round, when it was adopted."""
        if self.plan is not None and accumulation != self.accumulation:
            return UNKNOWN
        if self.plan is not None and plan.local_batch_sizes == self.plan.local_batch_sizes:
            return self.predicted
        return _number(plan.step_time), _number(plan.step_time_error)


UNFORESEEN = Foresight()
"""Before the first round."""


class Predictions:
    """Predictions of a run, from sync round to sync round.

    Attributes:
        predicted: what the policy predicted of the steps before the newest round.
        speed_up: speed of those steps over equal sizes, NaN if unknown.
    """

    def __init__(self) -> None:
        self.predicted, self.speed_up = UNKNOWN, math.nan
        self._policys = self._best = UNFORESEEN

    def compare(
        self, done: RoundResult, plan: BatchPlan | None, accumulation: int, watched: Predicted = UNKNOWN
    ) -> Predicted:
        """Take in a sync round, and predict the next steps.

        Args:
            done: outcome of the round.
            plan: plan under which the newest steps ran.
            accumulation: micro-batches of a step.
            watched: what a model that only watches predicts of the running plan, if the policy predicts nothing.

        Returns:
            What was predicted of the steps before this round, by the policy or else by the model that only watches.
        """
        self.speed_up = _speed_up(done.observations, plan, done.even)
        if plan is None:
            self.predicted = UNKNOWN
            return UNKNOWN
        self.predicted, best = (one.of(plan, accumulation) for one in (self._policys, self._best))
        if done.predicted is not None:
            self._policys = self._best = Foresight(plan, accumulation, (done.predicted, _number(done.error)))
        elif math.isfinite(watched[0]):
            self._best = Foresight(plan, accumulation, watched)
        return best


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _speed_up(observations: StepObservations, plan: BatchPlan | None, even: float) -> float:
    """Return the predicted seconds of a step of equal sizes over the measured ones."""
    if plan is None or not observations.num_steps or not math.isfinite(even):
        return math.nan
    sizes = plan.local_batch_sizes
    if max(sizes) - min(sizes) <= 1:
        return 1.0
    own = (observations.local_batch_sizes == np.array(sizes, dtype=float)).all(axis=1)
    times = observations.step_time[own]
    times = times[np.isfinite(times)]
    return even / float(np.median(times)) if times.size else math.nan
