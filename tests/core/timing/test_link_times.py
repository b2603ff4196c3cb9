"""What averaging takes: followed from round to round, and foretold for another number of workers."""

import json
import math

import numpy as np
import pytest
from scipy.optimize import nnls

from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.timing.fitting import steps_that_tell
from lightning_hetero.core.timing.link_times import Level, LinkTimes
from lightning_hetero.core.timing.times import EstimatorSettings


def round_of(workers, t_o, t_u, rng=None, steps=8, gamma=0.2, noise=0.0):
    shape = (steps, workers)
    late = np.zeros(shape)
    late[:, 1:] = 0.5  # all but the first wait for it
    scatter = 1.0 if rng is None else np.exp(noise * rng.standard_normal((steps, 1)))
    ones = np.ones(shape)
    return StepObservations(ones, ones, ones, gamma * ones, t_o * scatter + late, t_u * scatter + late, 3 * ones)


def test_whoever_comes_last_sees_what_the_link_takes():
    link = LinkTimes().observe(round_of(4, 0.3, 0.03))
    assert link.at(4) == pytest.approx((0.3, 0.03))
    assert link.gamma.value == pytest.approx(0.2)


def test_noise_is_averaged_and_a_jump_is_followed_at_once():
    rng = np.random.default_rng(0)
    link = LinkTimes()
    for _ in range(40):
        link = link.observe(round_of(4, 0.3, 0.03, rng, noise=0.05))
    assert link.at(4) == pytest.approx((0.3, 0.03), rel=0.02)
    assert link.error(4) / 0.33 < 0.02
    link = link.observe(round_of(4, 0.9, 0.09, rng, noise=0.05))
    assert link.at(4) == pytest.approx((0.9, 0.09), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_level_is_the_kalman_filter_of_one_state(seed):
    rng = np.random.default_rng(seed)
    level, value, variance = Level(), None, None
    for x in 1.0 + 0.02 * rng.standard_normal(30):
        noise = 0.03**2
        level = level.observe(x, noise, 1.0)
        if value is None:
            value, variance = x, noise + 0.02**2
            continue
        before = variance + 0.01**2
        gain = before / (before + noise + 0.02**2)
        value, variance = value + gain * (x - value), (1 - gain) * before
        assert (level.value, level.variance) == pytest.approx((value, variance))


def test_nothing_was_seen():
    with pytest.raises(ValueError, match="no synchronisation was seen"):
        LinkTimes().at(3)
    assert not LinkTimes()
    assert LinkTimes().error(3) == np.inf


def test_for_a_number_of_workers_that_was_not_seen_all_of_the_time_is_uncertain():
    """And no more than that: a fast link makes no prediction uncertain."""
    link = LinkTimes().observe(round_of(4, 0.3, 0.03))
    assert link.error(2) == pytest.approx(sum(link.at(2)))
    assert link.error(4) < 0.1 * link.error(2)


@pytest.mark.parametrize("seen", [(4,), (2, 8), (3, 6, 12)])
def test_another_number_of_workers_follows_the_ring(seen):
    """``transfer (n - 1) / n``, and from two numbers of workers on ``latency (n - 1)`` as well."""
    latency, transfer = (0.0 if len(seen) == 1 else 0.004), 0.2
    link = LinkTimes()
    for n in seen:
        link = link.observe(round_of(n, latency * (n - 1) + transfer * (n - 1) / n, 0.01))
    for n in (2, 5, 16):
        assert link.at(n)[0] == pytest.approx(latency * (n - 1) + transfer * (n - 1) / n)
    assert link.at(1)[0] == pytest.approx(0.0)


@pytest.mark.parametrize("seed", range(20))
def test_both_coefficients_are_the_non_negative_least_squares(seed):
    rng = np.random.default_rng(seed)
    seen = sorted(rng.choice(np.arange(2, 40), int(rng.integers(2, 5)), replace=False).tolist())
    seconds = rng.uniform(0, 1, len(seen)) * np.array(seen) ** rng.choice([-1.0, 0.0, 1.0, 2.0])
    link = LinkTimes(sync={n: (Level(t, 0.0), Level()) for n, t in zip(seen, seconds, strict=True)})
    latency, transfer = nnls(np.array([[n - 1, (n - 1) / n] for n in seen]), seconds)[0]
    assert link.at(41)[0] == pytest.approx(latency * 40 + transfer * 40 / 41)


def test_a_worker_that_ran_alone_says_nothing_of_the_ring():
    alone = LinkTimes().observe(round_of(1, 0.0, 0.0))
    assert alone.at(4) == (0.0, 0.0)
    assert alone.observe(round_of(4, 0.3, 0.03)).at(2) == pytest.approx((0.2, 0.02))


def test_a_link_that_takes_less_with_more_workers_gives_no_negative_times():
    link = LinkTimes().observe(round_of(2, 0.5, 0.05)).observe(round_of(8, 0.1, 0.01))
    assert all(min(link.at(n)) >= 0 for n in range(1, 65))
    only_latency = LinkTimes().observe(round_of(2, 0.01, 0.01)).observe(round_of(8, 0.2, 0.2))
    assert all(min(only_latency.at(n)) >= 0 for n in range(1, 65))


def test_state_goes_through_json():
    link = LinkTimes().observe(round_of(2, 0.5, 0.05)).observe(round_of(8, 0.7, 0.07))
    assert LinkTimes.from_state_dict(json.loads(json.dumps(link.state_dict()))) == link


def looks(tells, slower=1.0):
    """Steps of two workers on a link that takes 0.2 s; where they do not tell, both wait for each other."""
    steps = len(tells)
    ones, busy = np.ones((steps, 2)), np.array(tells)[:, None]
    late_first, late_last = np.tile([1.2, 1.0], (steps, 1)), np.tile([1.0, 1.5], (steps, 1))
    waits = np.where(busy, [0.6, 0.2], [0.9, 0.8]) * slower
    backward = np.where(busy, [1.0, 1.7], late_last)
    return StepObservations(
        ones, np.where(busy, [1.0, 1.1], late_first), backward, 0.2 * ones, waits, 0.1 * ones, 2 * ones
    )


def test_what_both_wait_is_a_bound_until_a_step_tells():
    never, half = looks([False] * 8), looks([True, False] * 4)
    assert steps_that_tell(half).tolist() == [True, False] * 4
    link = LinkTimes().observe(never)
    assert link.at(2)[0] == pytest.approx(0.8)
    assert link.error(2) > 0.3
    link = link.observe(half)
    assert link.at(2)[0] == pytest.approx(0.2, rel=0.05)
    assert link.error(2) < 0.02, "the scatter is that of the steps that tell"
    assert link.observe(never).at(2)[0] == pytest.approx(0.2, rel=0.05)


def test_one_step_is_no_jump_and_many_are():
    link = LinkTimes()
    for _ in range(8):
        link = link.observe(looks([True] * 8))
    assert link.observe(looks([True] + [False] * 7, slower=5.0)).at(2)[0] < 0.3
    assert link.observe(looks([True] * 8, slower=5.0)).at(2)[0] == pytest.approx(1.0)
    never_jumps = EstimatorSettings(link_jump=1e9)
    assert link.observe(looks([True] * 8, slower=5.0), settings=never_jumps).at(2)[0] < 0.9
    alone = LinkTimes().observe(looks([True] + [False] * 7))
    assert alone.error(2) > 0.02, "one step says little"


def test_a_bound_lowers_what_is_known_and_never_raises_it():
    known = Level(0.5, 0.01)
    assert known.below(0.8) == Level(0.5, pytest.approx(0.01 + 0.01**2))
    assert 0.3 < known.below(0.3).value < 0.5
    assert Level().below(0.8).value == 0.8
    assert Level().below(0.8).variance >= 0.25
    assert Level(0.5, 0.0001).below(0.05).value > 0.05, "one look is not believed at once"


@pytest.mark.parametrize("telling", [0, 1, 3])
def test_a_link_that_is_far_faster_than_known_is_learned_though_few_steps_tell(telling):
    """What both wait for each other is a bound in every step: below 1 s, it shows that the link recovered."""
    link = LinkTimes()
    for _ in range(8):
        link = link.observe(looks([True] * 8, slower=5.0))
    fast = link.observe(looks([True] * telling + [False] * (14 - telling), slower=0.5))
    assert fast.at(2)[0] == pytest.approx(0.4), "the median of the bounds"
    assert fast.error(2) > 0.1, "a bound says little of how much lower it is"
    assert fast.observe(looks([True] * 8, slower=0.5)).at(2)[0] == pytest.approx(0.1, rel=0.05)
    few = link.observe(looks([True] * min(telling, 1) + [False] * 2, slower=0.5))
    assert few.at(2)[0] > 0.6, "three steps are no jump"
    near = link.observe(looks([False] * 14, slower=1.1))
    assert near.at(2)[0] > 0.85, "a bound that is little below is no jump"


@pytest.mark.parametrize("seed", range(300))
def test_when_a_level_is_far_above_bounds(seed):
    draw = np.random.default_rng(seed)
    level = Level(draw.uniform(0.01, 2.0), 10 ** draw.uniform(-6, 0))
    bound, steps, settings = level.value * draw.uniform(0, 1.5), int(draw.integers(1, 50)), EstimatorSettings()
    variance = level.variance + 0.01**2 + 1.5 * 0.1**2 / steps + 0.02**2
    assert level.far_above(bound, steps, settings) == ((level.value - bound) / level.value > 4 * math.sqrt(variance))
    assert not Level(level.value).far_above(0.0, steps)


OTHER = EstimatorSettings(link_walk=0.05, link_rounds=0.03, link_jitter=0.2, link_bound_error=0.3, link_few_steps=5)


@pytest.mark.parametrize("settings", [EstimatorSettings(), OTHER])
def test_a_bound_below_counts_as_an_observation_with_the_settings(settings):
    known, noise = Level(0.5, 0.01), settings.link_jitter**2 + settings.link_rounds**2
    before = 0.01 + settings.link_walk**2
    gain = before / (before + noise)
    found = known.below(0.3, settings)
    assert (found.value, found.variance) == pytest.approx((0.5 - gain * 0.2, (1 - gain) * before))
    assert Level().below(0.8, settings) == Level(0.8, settings.link_bound_error**2)


def test_a_walk_counts_when_a_level_is_far_above():
    walks = EstimatorSettings(link_walk=0.3)
    assert Level(1.0, 0.0).far_above(0.4, 8)
    assert not Level(1.0, 0.0).far_above(0.4, 8, walks)


@pytest.mark.parametrize("settings", [EstimatorSettings(), OTHER])
def test_gamma_is_followed_with_the_noise_of_its_steps(settings):
    link = LinkTimes().observe(round_of(4, 0.3, 0.03, gamma=0.2), settings=settings)
    level = Level().observe(0.2, 0.01 / 8, 1.0, settings=settings).observe(0.3, 0.01 / 8, 1.0, settings=settings)
    assert link.observe(round_of(4, 0.3, 0.03, gamma=0.3), settings=settings).gamma == level


@pytest.mark.parametrize(("telling", "steps", "bound"), [(3, 4, True), (4, 14, False)])
def test_three_steps_that_tell_are_few_and_four_are_not(telling, steps, bound):
    link = LinkTimes()
    for _ in range(8):
        link = link.observe(looks([True] * 8, slower=5.0))
    found = link.observe(looks([True] * telling + [False] * (steps - telling), slower=0.5))
    assert found.at(2)[0] == pytest.approx(0.1)
    assert (found.error(2) > 0.04) == bound, "a bound says little, and the time itself a lot"


def test_the_scatter_of_the_last_all_reduce_is_that_of_steps():
    seen = round_of(4, 0.3, 0.03, np.random.default_rng(0), steps=32, noise=0.05)
    least = seen.last_sync.min(axis=1)
    jitter = 1.4826 * np.median(np.abs(least / np.median(least) - 1.0))
    assert LinkTimes().observe(seen).sync[4][1].variance == pytest.approx(1.5 * jitter**2 / 32 + 0.02**2)


@pytest.mark.parametrize(("gamma", "jumps"), [(0.5, True), (0.4, False)])
def test_gamma_jumps_by_its_own_scale(gamma, jumps):
    link = LinkTimes().observe(round_of(4, 0.3, 0.03, gamma=0.2)).observe(round_of(4, 0.3, 0.03, gamma=gamma))
    assert (link.gamma.value == pytest.approx(gamma)) == jumps


def test_the_last_all_reduce_is_followed_from_its_own_level():
    link = LinkTimes().observe(round_of(4, 0.3, 0.03)).observe(round_of(4, 0.3, 0.031))
    assert 0.03 < link.sync[4][1].value < 0.031
