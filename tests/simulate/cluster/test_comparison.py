"""Comparison of a run with its simulation."""

import pytest

from lightning_hetero.simulate import DeviceProfile
from lightning_hetero.simulate.cluster.comparison import compare_run, simulate_run

DEVICES = [DeviceProfile(0.001, 0.01, 0.002, 0.01, jitter=0.03), DeviceProfile(0.003, 0.01, 0.006, 0.01, jitter=0.03)]


def test_differences_are_found():
    result = simulate_run(DEVICES, 60, 50, seed=7)
    found = compare_run(result, result.seconds[:40] * 0.9, [(0, (30, 30)), (20, (46, 14))])
    assert len(found.seconds) == len(found.samples) == 40
    assert found.whole_difference == pytest.approx(-0.1)
    assert found.samples[19] == result.sizes[19, 0] - 30
    assert found.last == abs(result.plans[-1].plan.local_batch_sizes[0] - 46)
