"""Comparison of a run with its simulation."""

import numpy as np
import pytest

from lightning_hetero.simulate import DeviceProfile
from lightning_hetero.simulate.cluster.comparison import compare_run, simulate_run

DEVICES = [DeviceProfile(0.001, 0.01, 0.002, 0.01, jitter=0.03), DeviceProfile(0.003, 0.01, 0.006, 0.01, jitter=0.03)]


def test_a_run_that_is_the_simulation_differs_in_nothing():
    result = simulate_run(DEVICES, 60, 50, seed=7)
    plans = [(entry.step, entry.plan.local_batch_sizes) for entry in result.plans]
    found = compare_run(result, result.seconds, plans)
    assert (found.median_difference, found.whole_difference, found.last) == (0.0, 0.0, 0)
    assert not found.samples.any()


def test_differences_are_found():
    result = simulate_run(DEVICES, 60, 50, seed=7)
    found = compare_run(result, result.seconds[:40] * 0.9, [(0, (30, 30)), (20, (46, 14))])
    assert len(found.seconds) == len(found.samples) == 40
    assert found.whole_difference == pytest.approx(-0.1)
    assert found.samples[19] == result.sizes[19, 0] - 30
    assert found.last == abs(result.plans[-1].plan.local_batch_sizes[0] - 46)


def test_the_seed_is_that_of_the_first_device():
    times = [next(device.times(5 + i)) for i, device in enumerate(DEVICES)]
    expected = max((d.q * 30 + d.s) * a + (d.k * 30 + d.m) * p for d, (a, p) in zip(DEVICES, times, strict=True))
    np.testing.assert_allclose(simulate_run(DEVICES, 60, 1, seed=5).seconds[0], expected)


@pytest.mark.parametrize("plans", [[], [(3, (30, 30))], [(0, (60,))]])
def test_plans_that_do_not_fit_are_named(plans):
    with pytest.raises(ValueError, match="must be .step, sizes. pairs from step 0 on"):
        compare_run(simulate_run(DEVICES, 60, 5), [1.0] * 5, plans)
