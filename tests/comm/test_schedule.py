"""When ranks compare: by what that costs, soon where a decision waits for it, and soon again after a stall."""

import numpy as np
import pytest

from lightning_hetero.comm.schedule import BUDGET, FIRST, LONGEST, NEVER, ExchangeSchedule
from lightning_hetero.core.time_model import StepObservations

STEP = 0.02


def steps(number=8, seconds=STEP):
    rows = np.full((number, 2), seconds)
    return StepObservations(rows, rows, rows, rows, rows, rows, rows)


def pauses(costs, **kwargs):
    """Steps between exchanges that cost so much."""
    schedule = ExchangeSchedule("auto")
    return [schedule.after(0, steps(), cost, changed=False, **kwargs) for cost in costs]


def test_exchanges_cost_a_share_of_the_time_that_nobody_notices():
    cost = 5e-3
    (pause,) = pauses([cost])
    assert cost / (pause * STEP) == pytest.approx(BUDGET)
    assert pauses([1e-6, 1e9]) == [FIRST, FIRST]
    assert pauses([1e9]) == [LONGEST]


def test_a_link_that_stalls_in_one_exchange_does_not_put_off_the_next_ones():
    usual, stalled, after, slow = pauses([1e-3, 5.0, 1e-3, 1e-3])
    assert usual == stalled == after == slow < 20
    assert pauses([1e-3, 5.0, 5.0])[-1] == LONGEST, "a link that stays slow counts"


def test_a_decision_that_waits_for_the_next_steps_waits_for_few():
    assert pauses([5.0], waits=True) == [FIRST]
    assert ExchangeSchedule("auto").after(0, steps(0), 5.0, changed=True) == FIRST + 2
    assert ExchangeSchedule(50).after(7, steps(), 5.0, changed=True, waits=True) == 57
    assert ExchangeSchedule("epoch").after(7, steps(), 0.0, changed=True) == NEVER
