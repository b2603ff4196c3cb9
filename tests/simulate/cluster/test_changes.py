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
