"""Steps on the clock of a simulation: the link's jitter and trace, samples that do not count, speeds without jitter."""

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.truth.factors import ProfileFactors

NO_TIME = DeviceProfile(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("trace", [(), [(0.0, 1e6)]], ids=["constant", "trace"])
def test_the_jitter_of_the_link_is_on_latency_and_bytes(trace):
    link = LinkProfile(gradient_bytes=1e6, rate=1e6, latency=0.1, jitter=0.2, trace=trace)
    seconds = ClusterSimulator([NO_TIME] * 2, 20, link=link, policy="even", seed=3).run(20).seconds
    factors = ProfileFactors([], [], link.jitter, 3).take(20).link
    assert np.ptp(factors) > 0.1
    np.testing.assert_allclose(seconds, factors * link.seconds(2).sum())


def test_coefficients_and_times_are_those_of_the_next_step_without_jitter():
    devices = [
        DeviceProfile(0.001, 0.01, 0.002, 0.02, jitter=0.1, slowdown={0: 3.0, 5: 2.0, 10: 1.0}),
        DeviceProfile(0.001, 0, 0.002, 0),
    ]
    link = LinkProfile(gradient_bytes=1e6, rate=1e8)
    simulator = ClusterSimulator(devices, 20, link=link, policy="even")
    for slow in (3.0, 2.0, 1.0):
        np.testing.assert_allclose(simulator.coefficients()[:, 0], slow * np.array([0.001, 0.01, 0.002, 0.02]))
        np.testing.assert_allclose(simulator.coefficients()[:, 1], [0.001, 0, 0.002, 0])
        assert simulator.time(BatchPlan(20, (19, 1))) > simulator.time(simulator.plan)
        expected = simulator.time(simulator.plan), simulator.optimum()[0]
        result = simulator.run(5)
        assert result.exact[-5:] == pytest.approx(expected[0])
        assert result.optimum[-5:] == pytest.approx(expected[1])


def test_a_slowdown_is_one_for_all_or_one_each():
    simulator = ClusterSimulator([DeviceProfile(0.001, 0, 0.002, 0)] * 3, 30)
    with pytest.raises(ValueError, match=r"factors=\[1, 2\] must be .* one for each of 3 workers or one for all"):
        simulator.slow_down([1, 2])
    before = simulator.time(simulator.plan)
    simulator.slow_down(2.0)
    assert simulator.time(simulator.plan) == pytest.approx(2 * before)
