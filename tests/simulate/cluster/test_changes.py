"""Workers that join and leave: what is known of the others is kept."""

import numpy as np
import pytest

from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, Join, Leave, LinkProfile

DEVICES = [DeviceProfile(q=0.35e-3 / v, s=0.01, k=0.65e-3 / v, m=0.01, jitter=0.02) for v in (1.0, 0.5, 0.25, 0.25)]
LINK = LinkProfile(gradient_bytes=25e6, rate=1.25e9)


def test_a_worker_leaves_and_comes_back_and_the_others_keep_what_is_known_of_them():
    events = [Leave(100, "device 0"), Join(200, DEVICES[0], "device 0")]
    result = ClusterSimulator(DEVICES, 400, link=LINK, events=events, restart_seconds=30.0, seed=4).run(300)
    assert (result.sizes.sum(axis=1) == 400).all()
    assert (result.sizes[100:200, 0] == 0).all()
    assert np.isnan(result.idle[100:200, 0]).all()
    assert not np.isnan(result.idle[:, 1:]).any()
    for first in (100, 200):
        assert result.optimum[first] / result.exact[first] > 0.95  # from the first step on
        assert result.clock[first] - result.clock[first - 1] > 30.0
    assert result.share_since(280) > 0.98
    assert result.optimum[150] > result.optimum[50] == pytest.approx(result.optimum[250])


def test_a_new_worker_is_learned():
    fast = DeviceProfile(q=0.1e-3, s=0.01, k=0.2e-3, m=0.01, jitter=0.02, name="fast")
    result = ClusterSimulator(DEVICES[:2], 200, link=LINK, events=[Join(80, fast)], seed=4).run(200)
    assert result.names == ("device 0", "device 1", "fast of step 80")
    assert result.share_since(150) > 0.98
    assert result.sizes[-1, 2] > 120


def test_workers_go_on_with_their_random_numbers():
    devices = [DeviceProfile(0.001, 0, 0.002, 0, jitter=0.1), DeviceProfile(0.0001, 0, 0.0002, 0)]
    kept = ClusterSimulator(devices, 20, policy="even", seed=3).run(20)
    left = ClusterSimulator(devices, 20, policy="even", events=[Leave(9, "device 1")], seed=3).run(20)
    np.testing.assert_allclose(left.seconds[9:], 2 * kept.seconds[9:])
    left = ClusterSimulator(devices[::-1], 20, policy="even", events=[Leave(9, "device 0")], seed=2).run(20)
    np.testing.assert_allclose(left.seconds[9:], 2 * kept.seconds[9:])


@pytest.mark.parametrize(
    ("events", "error", "text"),
    [
        ([5], TypeError, "must be Join and Leave objects"),
        ([Leave(5, "device 7")], ValueError, "'device 7' leaves at step 5; there are only device 0, device 1"),
        ([Join(5, DEVICES[0], "device 1")], ValueError, "'device 1' joins at step 5 and is there already"),
        ([Leave(5, "device 0"), Leave(6, "device 1")], ValueError, "nobody is left"),
    ],
)
def test_what_cannot_happen_is_named(events, error, text):
    with pytest.raises(error, match=text):
        ClusterSimulator(DEVICES[:2], 20, events=events)


def test_bad_changes_are_named():
    with pytest.raises(ValueError, match="step=-1"):
        Leave(-1, "a")
    with pytest.raises(TypeError, match="must be a DeviceProfile"):
        Join(1, "A100")


def test_the_order_in_which_changes_are_given_does_not_matter():
    events = [Leave(20, "device 0"), Join(40, DEVICES[0], "device 0")]
    one, other = (ClusterSimulator(DEVICES, 400, events=given).run(60) for given in (events, events[::-1]))
    np.testing.assert_array_equal(one.sizes, other.sizes)
    assert (one.sizes[20:40, 0] == 0).all()
    assert (one.sizes[40:, 0] > 0).all()


def test_a_new_worker_has_random_numbers_of_its_own():
    """It takes the place of one that was there before, and would otherwise take the numbers of the one that stays."""
    device = DeviceProfile(0.001, 0, 0.002, 0, jitter=0.1)
    events = [Leave(0, "device 0"), Join(0, device, "new")]
    result = ClusterSimulator([device, device], 20, policy="even", events=events).run(20)
    assert result.names == ("device 1", "new")
    assert (result.idle.max(axis=1) > 1e-4).all()


def test_the_first_round_after_a_restart_comes_as_in_a_new_run():
    result = ClusterSimulator(DEVICES, 400, link=LINK, events=[Leave(100, "device 3")]).run(120)
    assert result.rounds[0].step == 8
    assert min(round_.step for round_ in result.rounds if round_.step > 100) == 108


def test_capacities_go_on_with_their_workers():
    events = [Leave(10, "device 1"), Join(20, DEVICES[0], "new", capacity=6.0)]
    result = ClusterSimulator(DEVICES[:3], 120, policy="static", capacities=[3.0, 2.0, 1.0], events=events).run(30)
    assert [entry.plan.local_batch_sizes for entry in result.plans] == [(60, 40, 20), (90, 30), (36, 12, 72)]


@pytest.mark.parametrize(("known", "capacity"), [((), 2.0), ((1.0, 1.0), None)])
def test_capacities_of_some_workers_are_refused(known, capacity):
    events = [Join(20, DEVICES[0], "new", capacity=capacity)]
    with pytest.raises(ValueError, match=r"'new' joins with capacity=(2.0|None); give the capacity of all workers"):
        ClusterSimulator(DEVICES[:2], 120, capacities=known, events=events)


def test_a_capacity_is_a_number_above_0():
    with pytest.raises(ValueError, match=r"capacity=0"):
        Join(20, DEVICES[0], capacity=0)


def test_what_is_slow_stays_slow_when_others_join_or_leave():
    no_time, device = DeviceProfile(0, 0, 0, 0), DeviceProfile(0.0, 0.5, 0.0, 0.5)
    link = LinkProfile(gradient_bytes=1e6, rate=1e6, buckets=1)
    events = [Leave(2, "device 0"), Join(4, no_time, "new")]
    simulator = ClusterSimulator([no_time, device, no_time], 12, link=link, policy="even", events=events)
    simulator.slow_down([1.0, 3.0, 1.0], link=5.0)
    result = simulator.run(6)
    np.testing.assert_allclose(result.seconds, 3 + 5 * np.repeat([4 / 3, 1.0, 4 / 3], 2))
    np.testing.assert_allclose(result.exact, result.seconds)
    simulator.slow_down(1.0)
    np.testing.assert_allclose(simulator.run(1).seconds[-1], 1 + 4 / 3)
