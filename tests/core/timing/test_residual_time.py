"""What steps take longer than predicted: a share and seconds, told apart where steps of several lengths were seen."""

import json

import numpy as np
import pytest

from lightning_hetero.core.timing.residual_time import Residual
from lightning_hetero.core.timing.times import EstimatorSettings


def seen(pairs, share, seconds, rng=None, noise=0.0):
    residual = Residual()
    for predicted in pairs:
        measured = (1 + share) * predicted + seconds
        if rng is not None:
            measured *= 1 + noise * rng.standard_normal()
        residual = residual.observe(predicted, measured, noise**2 + 1e-8)
    return residual


def test_steps_of_two_lengths_tell_a_share_from_seconds():
    residual = seen((0.1, 0.3) * 40, 0.04, 0.005)
    assert (residual.share, residual.seconds) == pytest.approx((0.04, 0.005), abs=1e-3)


def test_steps_of_one_length_leave_it_open_and_say_so():
    residual = seen((0.1,) * 40, 0.0, 0.004)
    assert residual.share * 0.1 + residual.seconds == pytest.approx(0.004, rel=0.05)
    assert residual.error(0.1) < 0.002
    assert residual.error(0.4) > 5 * residual.error(0.1)


def test_steps_of_one_length_are_half_a_share_and_half_seconds():
    residual = seen((0.1,) * 40, 0.0, 0.004)
    assert residual.share * 0.1 == pytest.approx(residual.seconds, rel=0.01)


def test_a_round_is_never_certain_and_nothing_is_before_the_first():
    assert Residual().error(2.0) == pytest.approx(0.06)
    assert Residual().observe(0.1, 0.104, 0.0).error(0.1) == pytest.approx(0.01 * 0.104, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_errors_are_what_they_say(seed):
    rng = np.random.default_rng(seed)
    residual = seen(np.tile([0.1, 0.2], 30), 0.03, 0.002, rng, 0.02)
    off = residual.share * 0.3 + residual.seconds - (0.03 * 0.3 + 0.002)
    assert abs(off) < 3 * residual.error(0.3)


def test_what_is_shorter_than_the_slowest_worker_was_no_step():
    residual = seen((0.1,) * 5, 0.0, 0.004)
    least = 1.0 - EstimatorSettings().residual_shortfall
    assert residual.observe(0.1, least * 0.099, 1e-4) == residual


def test_state_goes_through_json():
    residual = seen((0.1, 0.3), 0.04, 0.005)
    assert Residual.from_state_dict(json.loads(json.dumps(residual.state_dict()))) == residual
    assert Residual.from_state_dict(Residual().state_dict()) == Residual()
