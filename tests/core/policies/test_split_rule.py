"""The decision rule: a change has to pay while it holds."""

import math

import numpy as np
import pytest

from lightning_hetero.core.policies.split_rule import RuleSettings, cost, doubt, horizon

WALKS = np.array([0.0005, 0.01, 0.03])


def test_a_split_holds_as_long_as_the_run_is_old():
    quiet = np.array([1.0, 0.0, 0.0])
    assert horizon(0.1, WALKS, quiet, 10) == RuleSettings().least_horizon
    assert horizon(0.1, WALKS, quiet, 5000) == 5000


def test_a_gain_that_speeds_outrun_saves_in_fewer_steps():
    moving = np.array([0.0, 0.0, 1.0])
    for gain, steps in ((0.06, 5000), (0.01, 1000), (0.3, 300)):
        ratio = min(gain / (0.03 * math.sqrt(steps / 8) * math.sqrt(2 * math.pi)), 1.0)
        assert horizon(gain, WALKS, moving, steps) == pytest.approx(steps * ratio * (2 - ratio))
    assert horizon(0.0001, WALKS, moving, 200) == 8
    assert horizon(-0.1, WALKS, moving, 200) == 8
    both = np.array([0.5, 0.0, 0.5])
    assert horizon(0.06, WALKS, both, 5000) == pytest.approx((5000 + horizon(0.06, WALKS, moving, 5000)) / 2)


def test_each_walk_counts_for_eight_steps_at_least():
    far = np.array([1.0])
    assert horizon(0.001, far, np.ones(1), 256) == 8
    both, half = np.array([0.0005, 1.0]), np.array([0.5, 0.5])
    assert horizon(0.1, both, half, 256) == (256 + horizon(0.1, far, np.ones(1), 256)) / 2
    assert horizon(0.001, both, half, 256) == (horizon(0.001, both[:1], np.ones(1), 256) + 8) / 2


@pytest.mark.parametrize("gain", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("walk", [0.003, 0.02, 0.06])
def test_the_horizon_is_what_a_split_saves_while_speeds_walk(gain, walk):
    """By simulation: a worker that is late by the gain, and one that is not, walk alike."""
    steps, rng = 512, np.random.default_rng(0)
    paths = np.cumsum(walk * rng.standard_normal((4000, steps // 8)), axis=1)
    saved = np.abs(gain + paths).mean(axis=0) - np.abs(paths).mean(axis=0)
    exact = 8 * saved.sum() / gain
    assert 0.95 * exact <= horizon(gain, np.array([walk]), np.ones(1), steps) <= 1.35 * exact


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.0), (32, 0.25), (96, 0.75), (128, 1.0), (10_000, 1.0)])
def test_a_change_costs_a_young_run_less(steps, expected):
    assert cost(steps) == expected
    assert cost(steps, RuleSettings(change_steps=3.0)) == 3.0 * expected
    assert cost(steps, RuleSettings(young=2 * 128.0)) == min(1.0, steps / 256)


@pytest.mark.parametrize(("scatter", "share"), [(0.0, 0.0), (0.01, 1 / 16), (0.02, 0.25), (0.04, 1.0), (0.5, 1.0)])
def test_doubt_falls_with_the_variance_of_single_steps_and_where_speeds_walk(scatter, share):
    settings = RuleSettings()
    for workers, moving in ((1, 0.0), (5, 0.3), (4, 1.0)):
        at = np.full((workers, 2), scatter)
        assert doubt(at, moving, False) == pytest.approx(settings.doubt * share * (1.0 - moving))
        assert doubt(at, moving, True) == pytest.approx(settings.doubt * (1.0 - moving))
    assert doubt(at, 0.0, False, RuleSettings(doubt=4.0, noisy=0.08)) == pytest.approx(
        4.0 * min(1.0, scatter / 0.08) ** 2
    )


def test_one_worker_that_scatters_casts_no_doubt_on_all():
    quiet = np.full((5, 2), 0.02)
    odd = quiet.copy()
    odd[3] = 0.5
    assert doubt(odd, 0.0, False) == doubt(quiet, 0.0, False)


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("change_steps", -0.1, 0.0),
        ("doubt", -1.0, 0.0),
        ("soon", -0.1, 0.0),
        ("least_horizon", 7.9, 8.0),
        ("young", 0.0, 1.0),
        ("noisy", 0.0, 0.001),
        ("noisy", math.nan, 1.0),
        ("doubt", math.nan, 1.0),
    ],
)
def test_a_setting_out_of_range_is_refused(name, wrong, allowed):
    with pytest.raises(ValueError, match=f"{name}=.* of the decision rule; give "):
        RuleSettings(**{name: wrong})
    assert getattr(RuleSettings(**{name: allowed}), name) == allowed
