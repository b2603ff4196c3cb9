"""Factors of simulated devices: those that an emulated device with the same profile and seed takes."""

import itertools

import numpy as np
import pytest

from lightning_hetero.simulate import DeviceProfile
from lightning_hetero.simulate.cluster.truth.factors import ProfileFactors

PROFILES = [
    DeviceProfile(1, 0, 1, 0),
    DeviceProfile(1, 0, 1, 0, jitter=0.1),
    DeviceProfile(1, 0, 1, 0, round_jitter=0.1, round_passes=5),
    DeviceProfile(1, 0, 1, 0, jitter=0.05, round_jitter=0.02, slowdown={7: 2.0, 90: 0.5}),
    DeviceProfile(1, 0, 1, 0, jitter=0.05, slowdown={0: 3.0, 50: 1.0}, gradual=True),
    DeviceProfile(1, 0, 1, 0, slowdown={40: 2.0}),
]


@pytest.mark.parametrize("parts", [(1,) * 150, (150,), (8, 3, 64, 1, 74), (100, 50)], ids=str)
def test_the_stream_of_each_profile_in_whatever_parts(parts):
    stream = ProfileFactors(PROFILES, range(3, 3 + len(PROFILES)))
    found = [stream.take(steps) for steps in parts]
    devices, slow = (np.concatenate([getattr(part, name) for part in found]) for name in ("devices", "slow"))
    for i, profile in enumerate(PROFILES):
        np.testing.assert_allclose(devices[:, i], list(itertools.islice(profile.times(3 + i), 150)), rtol=1e-14)
        np.testing.assert_array_equal(slow[:, i], [profile.slowdown_at(t) for t in range(150)])
