"""Settings of the proportional controller: their ranges, and what some of them move."""

import numpy as np
import pytest

from lightning_hetero.core.batching.control_settings import ControlSettings
from lightning_hetero.core.batching.proportional_control import ControllerState, control, smooth
from lightning_hetero.core.timing.step_times import SmoothingSettings, StepTimes


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("min_steps", 0, ValueError),
        ("min_steps", 2.5, TypeError),
        ("first_bound_lifetime", 0, ValueError),
        ("bound_lifetime_growth", 0, ValueError),
        ("longest_bound_lifetime", 0, ValueError),
        ("significant_errors", -1.0, ValueError),
        ("min_throughput_change", 1.1, ValueError),
        ("finishing_dead_band", -0.1, ValueError),
        ("gain_after_reversal", 0.0, ValueError),
        ("min_gain", 1.1, ValueError),
        ("gain_growth", 0.9, ValueError),
        ("gain_recovery", 0.9, ValueError),
    ],
)
def test_a_setting_out_of_range_is_refused(name, wrong, error):
    with pytest.raises(error, match=rf"ControlSettings\.{name}"):
        ControlSettings(**{name: wrong})


def state_of(times, steps=6, **settings):
    state = ControllerState((200, 200), StepTimes(settings=SmoothingSettings(**settings)))
    for step in range(steps):
        state = smooth(state, times if step % 2 else np.array(times)[::-1])
    return state


def test_what_is_within_the_noise_changes_sizes_only_where_that_is_asked_for():
    state, bounds = state_of([0.1, 0.13], steps=7), {"min_local": (1, 1), "dead_band": 0.01}
    assert control(state, 400, **bounds)[1] is None
    assert control(state, 400, **bounds, settings=ControlSettings(significant_errors=0.0))[1] is not None


def turning(**settings):
    """The share of the rule's step after a size has turned round."""
    settings, state = ControlSettings(**settings), smooth(ControllerState((20, 20)), [0.1, 0.3])
    state, sizes = control(state, 40, min_local=(1, 1), settings=settings)
    assert sizes == (30, 10)
    return control(smooth(state, [0.4, 0.1]), 40, min_local=(1, 1), settings=settings)[0].gains


def test_a_size_that_turns_round_goes_the_given_share_of_the_way():
    assert turning() == (0.5, 0.5)
    assert turning(gain_after_reversal=0.25) == (0.25, 0.25)
    assert turning(gain_after_reversal=0.25, min_gain=0.4) == (0.4, 0.4)


def test_settings_of_the_smoothing_stay_through_steps_and_splits():
    state = state_of([0.1, 0.1], longest_mean_steps=3)
    assert state.times.steps == 3
    assert state.times.restarted().settings == state.times.settings
