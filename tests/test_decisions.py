"""From a setting to the plan, through every front end: what is given, or measured, decides whether a split changes."""

import numpy as np
import pytest

from lightning_hetero.comm.observer import StepObserver
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.planner import PerfModelPlanner
from tests.helpers import run_ranks
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
    """Trainings whose steps take what they are told to."""
    decide, measured = PerfModelPlanner.decide, None

    def told(self, observations, current, context):
        sizes = np.tile(np.array(current.local_batch_sizes, dtype=float), (8, 1))
        seconds, zeros = sizes * SECONDS, np.zeros_like(sizes)
        step = np.repeat(seconds.max(axis=1, keepdims=True), 2, axis=1)
        return decide(self, StepObservations(sizes, zeros, seconds, seconds, zeros, zeros, step), current, context)

    PerfModelPlanner.decide = told
    StepObserver.change_cost = property(lambda self: measured)
    histories = {}
    for name, (settings, cost, _) in CASES.items():
        measured = cost
        more = {"world_size": 2, "epochs": 1, "another": name != list(CASES)[-1]}
        histories[name] = FRONT_ENDS[front_end](rank, {"replan": 5, **settings}, 5, **more)["history"]
    return histories


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_hysteresis_and_costs_of_a_change_decide_whether_the_split_changes(front_end):
    first, second = run_ranks(_changes, 2, front_end)
    assert first == second
    for name, (_, _, changes) in CASES.items():
        sizes = [sizes for *_, sizes in first[name]]
        assert sizes == ([(5, 5), (6, 4)] if changes else [(5, 5)]), name
