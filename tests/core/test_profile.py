"""What a worker's profile keeps: its fresh pace, a slope that survives drift, a bounded and portable memory."""

import json

import numpy as np
import pytest

from lightning_hetero.core.profile import NodeProfile
from lightning_hetero.core.time_model import NodeTimeModel

TRUE = NodeTimeModel(q=0.001, s=0.01, k=0.002, m=0.02)


def run(profile, size, *, node=TRUE, speed=1.0, steps=5):
    """``steps`` steps at one size by a worker that takes ``speed`` times as long as ``node``."""
    return profile.observe(size, [speed * node.forward_time(size)] * steps, [speed * node.backward_time(size)] * steps)


def test_two_sizes_give_the_line():
    model = run(run(NodeProfile(), 16), 32).model()
    assert (model.q, model.s, model.k, model.m) == pytest.approx((TRUE.q, TRUE.s, TRUE.k, TRUE.m), rel=2e-3)


def test_one_size_goes_through_the_origin():
    model = run(NodeProfile(), 16).model()
    assert model.s == model.m == 0
    assert model.compute_time(16) == pytest.approx(TRUE.compute_time(16), rel=2e-3)


def test_nothing_observed_is_an_error():
    with pytest.raises(ValueError, match="nothing was observed"):
        NodeProfile().model()


def test_a_single_step_that_took_long_does_not_count():
    profile = NodeProfile().observe(8, [0.01, 0.01, 9.0], [0.02, 0.02, 5.0])
    assert (profile.points[0].forward, profile.points[0].backward) == (0.01, 0.02)


def test_observing_leaves_the_old_profile_as_it_was():
    profile = run(NodeProfile(), 16)
    before = profile.state_dict()
    run(profile, 16, speed=1.1)
    assert profile.state_dict() == before


@pytest.mark.parametrize("speed", [10.0, 2.0, 0.5, 0.1])
def test_drift_rescales_older_points_and_keeps_the_slope(speed):
    profile = run(run(run(NodeProfile(), 16), 32), 24)
    changed = run(profile, 24, speed=speed)
    assert changed.drifted
    model = changed.model()
    for b in (8, 16, 32, 64):
        assert model.compute_time(b) == pytest.approx(speed * TRUE.compute_time(b), rel=2e-3)
    assert not run(changed, 24, speed=speed).drifted
    assert not changed.settled().drifted
    assert changed.settled().points == changed.points


def test_drift_is_seen_at_a_size_never_run():
    profile = run(run(NodeProfile(), 16), 32)
    assert not run(profile, 48).drifted
    changed = run(profile, 48, speed=3.0)
    assert changed.drifted
    assert changed.model().compute_time(20) == pytest.approx(3 * TRUE.compute_time(20), rel=2e-3)


@pytest.mark.parametrize(("size", "speed"), [(16, 1.1), (16, 0.9), (48, 1.3), (48, 0.8)])
def test_scatter_is_no_drift(size, speed):
    assert not run(run(run(NodeProfile(), 16), 32), size, speed=speed).drifted


def test_four_steps_are_too_few_for_a_drift():
    profile = run(run(NodeProfile(), 16), 32)
    assert not run(profile, 16, speed=5.0, steps=4).drifted
    assert run(profile, 16, speed=5.0, steps=5).drifted


def test_older_points_fade():
    profile = run(NodeProfile(), 16, steps=10)
    weights = [profile.points[0].weight]
    for _ in range(60):
        profile = run(profile, 32)
        weights.append(next(p.weight for p in profile.points if p.size == 16))
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == 10
    assert weights[1] == pytest.approx(9)
    assert weights[-1] == 0.5


def test_weight_is_bounded_so_that_news_always_count():
    profile = NodeProfile()
    for _ in range(100):
        profile = run(profile, 16, steps=50)
    for _ in range(10):
        profile = run(profile, 16, speed=1.1, steps=50)
    assert profile.model().compute_time(16) == pytest.approx(1.1 * TRUE.compute_time(16), rel=0.01)


def test_at_most_sixteen_points_the_newest():
    profile = NodeProfile()
    for size in range(1, 31):
        profile = run(profile, size)
        assert len(profile.points) <= 16
    assert profile.sizes == tuple(range(15, 31))


def test_size_run_again_is_no_new_point_and_counts_as_newest():
    profile = run(run(run(NodeProfile(), 16), 32), 16)
    assert [point.size for point in profile.points] == [32, 16]


def test_state_is_plain_python_and_comes_back():
    rng = np.random.default_rng(0)
    profile = NodeProfile()
    for size in (np.int64(16), 32, 48):
        profile = profile.observe(size, rng.random(5), rng.random(5).astype(np.float32))
    state = profile.state_dict()
    back = NodeProfile.from_state_dict(json.loads(json.dumps(state)))
    assert back.points == profile.points
    assert back.state_dict() == state
