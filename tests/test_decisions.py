"""From a setting to the plan, through every front end: what is given, or measured, decides whether a split changes.

And what a decision says of the running plan is told of that one.
"""

import re

import numpy as np
import pytest
import torch

from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.data import PermutationStream
from lightning_hetero.engine import HeteroEngine, training_data
from lightning_hetero.hardware import identity
from tests.helpers import run_ranks
from tests.learned import knowing
from tests.loops import FRONT_ENDS

SECONDS = np.array([0.98 * 5 / 6, 1.0])
"""Of a sample on each rank: 6/4 takes 2 % less than 5/5."""

DEAR = 1e6
CASES = {
    "whatever pays": ({}, None, True),
    "more than the gain is asked for": ({"hysteresis": 0.03}, None, False),
    "less than the gain is asked for": ({"hysteresis": 0.01}, None, True),
    "a dear change": ({"change_cost": DEAR}, None, False),
    "a change that was dear": ({}, DEAR, False),
    "a cheap change, whatever the first ones took": ({"change_cost": 0.0}, DEAR, True),
}
"""Settings, what changes were measured to cost, and whether the split changes."""


def _changes(rank, front_end):
    """Trainings whose steps take what they are told to: plans of each, and steps between its looks."""
    decide, measured, elapsed = PerfModelPlanner.decide, None, []

    def told(self, observations, current, context):
        elapsed.append(context.elapsed)
        sizes = np.tile(np.array(current.local_batch_sizes, dtype=float), (8, 1))
        seconds, zeros = sizes * SECONDS, np.zeros_like(sizes)
        step = np.repeat(seconds.max(axis=1, keepdims=True), 2, axis=1)
        return decide(self, StepObservations(sizes, zeros, seconds, seconds, zeros, zeros, step), current, context)

    PerfModelPlanner.decide = told
    StepTimer.change_cost = property(lambda self: measured)
    found = {}
    for name, (settings, cost, _) in CASES.items():
        measured, elapsed = cost, []
        more = {"world_size": 2, "epochs": 1, "another": name != list(CASES)[-1]}
        history = FRONT_ENDS[front_end](rank, {"replan": 5, **settings}, 5, **more)["history"]
        found[name] = history, elapsed
    return found


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_hysteresis_and_costs_of_a_change_decide_whether_the_split_changes(front_end):
    first, second = run_ranks(_changes, 2, front_end)
    for name, (_, _, changes) in CASES.items():
        (history, elapsed), (other, nobody) = first[name], second[name]
        assert history == other
        assert [sizes for *_, sizes in history] == ([(5, 5), (6, 4)] if changes else [(5, 5)]), name
        assert (elapsed, nobody) == ([5], [])


def _begins(rank):
    """Rank 0 was seen before; rank 1 is new, with three times the peak FLOP/s."""
    torch.distributed.init_process_group("gloo")
    training_data.capacity = lambda device: (1.0, 3.0)[rank]
    device, found = torch.device("cpu"), []
    for planner in (knowing({identity(device, 0): (0.001, 0.0, 0.002, 0.0)}), StaticPlanner(), None):
        engine = HeteroEngine(HeteroConfig(), rank=rank, world_size=2, device=device, local_rank=rank)
        engine.shard(PermutationStream(400, shuffle=False, seed=0), batch_size=20, planner=planner)
        found.append((engine.plan.local_batch_sizes, engine.plan_history[0].describe()))
    return found


def test_a_new_rank_starts_with_what_its_hardware_promises():
    for known, static, even in run_ranks(_begins, 2):
        assert [sizes for sizes, _ in (known, static, even)] == [(10, 30), (10, 30), (20, 20)]
        assert "rank 1 is new and starts by peak FLOP/s" in known[1]
        assert re.search(r"predicted step 30\.\d \+- \d", known[1])


class Sure(StaticPlanner):
    """A step takes as many seconds as it has samples, give or take a tenth."""

    def predict(self, plan, context):
        return float(plan.total_batch_size)

    def decide(self, observations, current, context):
        return Decision(self, error=0.1 * current.total_batch_size)


def test_steps_are_compared_with_what_was_predicted_before_they_ran():
    """Of a plan that was not predicted when it was adopted, nothing is known until a round has seen it."""
    engine = HeteroEngine(HeteroConfig(replan=8), rank=0, world_size=1, device=torch.device("cpu"))
    engine.shard(PermutationStream(400, shuffle=False, seed=0), batch_size=4)
    found = []
    for step in range(34):
        engine.begin_step(0, step)
        with engine.backward():
            engine.observer.bucket_done(engine.observer.bucket_ready())
        engine.end_step()
        if step == 8:
            engine.adopt(BatchPlan(3, (3,)), not_before=(0, 20))
        if engine.sync_due:
            plan = engine.plan
            found.append(engine.metrics(engine.exchange(Sure(), not_before=(0, step + 1)), plan))
    names = ("hetero/total_batch_size", "hetero/predicted_step_time", "hetero/predicted_step_time_error")
    told = [tuple(metrics.get(name) for name in names) for metrics in found]
    assert told == [(4.0, None, None), (4.0, 4.0, 0.4), (3.0, None, None), (3.0, 3.0, pytest.approx(0.3))]
