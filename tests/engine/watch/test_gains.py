"""The gain of a change is the median step before against the median step after."""

import math

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.engine.watch.gains import Gain, GainMeter


def seen(*stretches):
    """Observations of stretches ``(sizes, seconds of each step)``."""
    rows = [(sizes, time) for sizes, times in stretches for time in times]
    sizes = np.array([row[0] for row in rows], dtype=float)
    step = np.array([[row[1]] * sizes.shape[1] for row in rows])
    zeros = np.zeros_like(sizes)
    return StepObservations(sizes, zeros, zeros, zeros, zeros, zeros, step)


def entry(*sizes, predicted=None):
    return PlanEntry(0, 9, BatchPlan(sum(sizes), sizes, step_time=predicted), "optimum")


EVEN, UNEVEN = (8, 8), (12, 4)


def test_a_change_is_measured_once():
    meter = GainMeter()
    assert meter.observe(seen((EVEN, [0.3] * 8))) is None
    meter.changed(entry(*UNEVEN, predicted=0.25), EVEN)
    gain = meter.observe(seen((EVEN, [0.32] * 4), (UNEVEN, [0.24] * 5)))
    assert (gain.before, gain.after, gain.predicted) == (0.32, 0.24, 0.25)
    assert meter.observe(seen((UNEVEN, [0.24] * 8))) is None


def test_it_waits_for_enough_steps():
    meter = GainMeter()
    meter.observe(seen((EVEN, [0.3] * 8)))
    meter.changed(entry(*UNEVEN), EVEN)
    assert meter.observe(seen((UNEVEN, [0.2] * 3))) is None
    gain = meter.observe(seen((UNEVEN, [0.2] * 3 + [math.nan] + [0.3])))
    assert (gain.before, gain.after) == (0.3, 0.2)
    assert math.isnan(gain.predicted)


@pytest.mark.parametrize("odd", [0.01, 9.0])
def test_medians_ignore_single_steps(odd):
    meter = GainMeter()
    meter.observe(seen((EVEN, [0.3, 0.3, 0.3, odd, 0.3])))
    meter.changed(entry(*UNEVEN), EVEN)
    assert meter.observe(seen((UNEVEN, [odd, 0.2, 0.2, 0.2, 0.2]))) == Gain(entry(*UNEVEN), 0.3, 0.2)


def test_a_step_that_one_worker_did_not_time_does_not_count():
    meter, values = GainMeter(), seen((UNEVEN, [0.1] + [0.2] * 3))
    values.step_time[0, 1] = math.nan
    meter.observe(seen((EVEN, [0.3] * 4)))
    meter.changed(entry(*UNEVEN), EVEN)
    assert meter.observe(values) is None
    assert meter.observe(seen((UNEVEN, [0.2] * 4))) == Gain(entry(*UNEVEN), 0.3, 0.2)


def test_another_total_is_no_gain():
    meter = GainMeter()
    meter.observe(seen((EVEN, [0.3] * 8)))
    meter.changed(entry(24, 8), EVEN)
    assert meter.observe(seen(((24, 8), [0.5] * 8))) is None
    meter.changed(entry(20, 12), (24, 8))
    assert meter.observe(seen(((20, 12), [0.4] * 8))) == Gain(entry(20, 12), 0.5, 0.4)


def test_the_newest_steps_of_a_split_are_its_past():
    """A split comes back after the steps that measured a change, and the next change is compared with these."""
    meter = GainMeter()
    meter.observe(seen((EVEN, [0.3] * 4)))
    meter.changed(entry(*UNEVEN), EVEN)
    assert meter.observe(seen((UNEVEN, [0.2] * 4), (EVEN, [0.35] * 4))) == Gain(entry(*UNEVEN), 0.3, 0.2)
    meter.changed(entry(13, 3), EVEN)
    assert meter.observe(seen(((13, 3), [0.25] * 4))) == Gain(entry(13, 3), 0.35, 0.25)


def test_a_plan_that_is_replaced_at_once_is_compared_with_the_one_before():
    meter, last = GainMeter(), entry(13, 3)
    meter.observe(seen((EVEN, [0.3] * 8)))
    meter.changed(entry(*UNEVEN), EVEN)
    meter.changed(last, UNEVEN)
    assert meter.observe(seen((UNEVEN, [0.25] * 2), ((13, 3), [0.2] * 6))) == Gain(last, 0.3, 0.2)


def test_without_a_measured_past_nothing_is_said():
    meter = GainMeter()
    meter.changed(entry(*UNEVEN), EVEN)
    assert meter.observe(seen((UNEVEN, [0.2] * 8))) is None


def test_lines_are_short():
    assert Gain(entry(*UNEVEN, predicted=0.244), 0.2731, 0.2412).describe() == (
        "epoch 0 step 9: step 273 -> 241 ms measured (predicted 244 ms)"
    )
    assert Gain(entry(*UNEVEN), 0.0091234, 0.0081234).describe() == "epoch 0 step 9: step 9.12 -> 8.12 ms measured"
    assert Gain(entry(*UNEVEN), 2.5, 0.0512).describe() == "epoch 0 step 9: step 2500 -> 51.2 ms measured"
