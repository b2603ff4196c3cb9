"""Noise of a simulated training, and the total that the real planner chooses by it."""

import numpy as np
import pytest

from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile, NoiseTrajectory
from lightning_hetero.simulate.cluster.control.replay import RecordingPlanner

DEVICES = [DeviceProfile(q=0.35e-3 / v, s=0.01, k=0.65e-3 / v, m=0.01, jitter=0.02) for v in (1.0, 0.5, 0.25)]
LINK = LinkProfile(gradient_bytes=25e6, rate=1.25e9)


def simulated(scale, steps=300, **more):
    planner = GoodputPlanner(max_total_batch_size=20_000)
    simulator = ClusterSimulator(DEVICES, 60, link=LINK, policy=planner, noise_scale=scale, seed=1, **more)
    return simulator, simulator.run(steps)


def goodput(simulator, total, scale):
    return total / simulator.optimum(total)[0] * (scale + 60) / (scale + total)


def test_the_total_goes_where_goodput_is_highest():
    simulator, result = simulated(NoiseTrajectory(lambda samples: 2000.0, errors=(0.1, 0.05)))
    best = max(goodput(simulator, total, 2000.0) for total in np.unique(np.geomspace(60, 20_000, 200).astype(int)))
    assert goodput(simulator, int(result.totals[-1]), 2000.0) > 0.97 * best
    assert result.totals[0] == 60
    assert (result.sizes.sum(axis=1) == result.totals).all()
    assert result.samples[-1] == result.totals.sum()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"scale": 100.0}, TypeError, "must be a function of the samples so far"),
        ({"scale": lambda n: 1.0, "errors": (-1.0, 0.0)}, ValueError, "errors=-1.0"),
        ({"scale": lambda n: 1.0, "horizon": 0.0}, ValueError, "horizon=0.0"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=text):
        NoiseTrajectory(**wrong)


def test_a_planner_that_is_recorded_moves_the_total():
    recording = RecordingPlanner(GoodputPlanner(max_total_batch_size=20_000, initial_total=60))
    result = ClusterSimulator(DEVICES, 60, link=LINK, policy=recording, noise_scale=lambda samples: 2000.0).run(60)
    assert recording.moves_total
    assert result.totals[-1] > 60
