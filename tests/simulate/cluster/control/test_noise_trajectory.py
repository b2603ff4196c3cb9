"""Noise of a simulated training, and the total that the real planner chooses by it."""

import numpy as np
import pytest

from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
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


def test_the_total_follows_a_noise_scale_that_grows():
    _, result = simulated(NoiseTrajectory(lambda samples: 60.0 + samples / 10.0, horizon=3000.0), steps=400)
    assert result.totals[-1] > 4 * result.totals[100] > 0


def test_the_estimate_is_that_of_the_samples_it_looks_back_on():
    noise = NoiseTrajectory(lambda samples: 100.0 if samples < 1000 else 400.0, errors=(0.0, 0.0), horizon=500.0)
    noise.see(total=100, steps=10, samples=0)
    assert noise.estimate().noise_scale == pytest.approx(100.0)
    noise.see(total=100, steps=100, samples=1000)
    assert noise.estimate().noise_scale == pytest.approx(400.0, rel=0.01)


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


def test_a_noise_scale_below_zero_is_named():
    with pytest.raises(ValueError, match=r"noise_scale\(...\)=-5.0 is out of range"):
        simulated(lambda samples: -5.0)


@pytest.mark.parametrize("errors", [(0.4, 0.0), (0.0, 0.1)])
def test_the_error_of_a_single_step_is_that_given(errors):
    """With a total so large that the measured gradient is the true one, up to its error."""
    found = []
    for seed in range(400):
        noise = NoiseTrajectory(lambda samples: 100.0, errors=errors)
        noise.begin(seed)
        noise.see(total=10**9, steps=1, samples=0)
        found.append(noise.estimate().noise_scale / 100.0)
    assert np.std(found) == pytest.approx(max(errors), rel=0.15)
    assert np.mean(found) == pytest.approx(1.0, abs=0.05)


def test_the_seed_is_that_of_the_errors():
    estimates = []
    for seed in (1, 2, 1):
        recording = RecordingPlanner(GoodputPlanner(max_total_batch_size=20_000, initial_total=60))
        devices = [DeviceProfile(0.001, 0.01, 0.002, 0.01), DeviceProfile(0.002, 0.01, 0.004, 0.01)]
        ClusterSimulator(devices, 60, policy=recording, noise_scale=lambda samples: 2000.0, seed=seed).run(20)
        estimates.append(recording.log[0].context.noise)
    assert estimates[0] == estimates[2] != estimates[1]


def test_a_planner_that_is_recorded_moves_the_total():
    recording = RecordingPlanner(GoodputPlanner(max_total_batch_size=20_000, initial_total=60))
    result = ClusterSimulator(DEVICES, 60, link=LINK, policy=recording, noise_scale=lambda samples: 2000.0).run(60)
    assert recording.moves_total
    assert result.totals[-1] > 60


def test_an_estimate_is_of_all_steps_since_the_last_round():
    recording = RecordingPlanner(PerfModelPlanner())
    noise = NoiseTrajectory(lambda samples: 100.0 + samples, errors=(0.0, 0.0))
    ClusterSimulator(DEVICES, 60, policy=recording, noise_scale=noise, replan=8).run(8)
    assert recording.log[0].context.noise.noise_scale == pytest.approx(100.0 + np.mean(60 * np.arange(8)))
