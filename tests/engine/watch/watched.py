"""One rank of a run that is watched, with what its sync rounds measure."""

import numpy as np
import torch

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.engine.watch.time_budget import TimeBudget
from lightning_hetero.engine.watch.watch import RunWatch
from tests.recorded import header

CPU = torch.device("cpu")
CONTEXT = PlanContext(24, ("a", "b", "c"), (1, 1, 1))
EVEN, UNEVEN = BatchPlan(24, (8, 8, 8)), BatchPlan(24, (9, 9, 6), step_time=0.2)


def seen(backward, plan=EVEN, steps=8, link=0.01):
    backward = np.tile(np.asarray(backward, dtype=float), (steps, 1))
    sizes, zeros = np.tile(np.asarray(plan.local_batch_sizes, dtype=float), (steps, 1)), np.zeros_like(backward)
    step = backward.max(axis=1, keepdims=True) + link
    return StepObservations(sizes, zeros, backward, zeros, zeros, step - backward, zeros + step)


class Run:
    """One rank of a run that is watched; by default there is time for all of it, however slow the machine."""

    def __init__(self, rank=0, records=True, work=lambda: 0.0):
        self.watch, self.steps = RunWatch(rank, 3, CPU, records=records, budget=TimeBudget(lambda: 0.0, work)), 0
        self.watch.describe(header(3), None)

    def round(self, observations, plan=EVEN, entry=None, even=None, accumulation=1, at=None, **more):
        self.steps += 8
        at = (0, self.steps * accumulation) if at is None else at
        even = self.watch.even_step(None, observations, plan, CONTEXT) if even is None else even
        done = RoundResult(None, observations, entry, None, even=even, kept=more.pop("kept", None))
        self.watch.observe(done, plan, at, self.steps, accumulation, **more)
