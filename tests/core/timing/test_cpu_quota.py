"""Steps under a processor quota: those that it bounds take what it allows, the others what they took."""

import numpy as np
import pytest

from lightning_hetero.core.timing.cpu_quota import CFS_PERIOD, quota_limited_times


def used(steps, seed=0):
    """Processor seconds outside of and in backward."""
    return np.random.default_rng(seed).uniform(0.01, 0.03, (2, steps))


@pytest.mark.parametrize("cores", [0.25, 0.5, 0.9])
def test_steps_that_the_quota_bounds_take_their_processor_time_over_the_cores(cores):
    outside, backward = used(20)
    burst = outside.copy(), backward.copy()  # at full speed while the quota of the periods before lasts
    found = quota_limited_times(*burst, outside, backward, cores)
    np.testing.assert_allclose(found, np.stack([outside, backward]) / cores)


def test_a_window_that_took_longer_than_its_quota_counts_with_all_that_it_took():
    """Within a period of what the quota allows, it is what bounds the worker."""
    outside, backward = used(20)
    earned = (outside + backward).sum() / 0.5
    longer = 1.0 + 0.9 * min(CFS_PERIOD, 0.1 * earned) / earned
    seen = 2.0 * longer * outside, 2.0 * longer * backward
    found = quota_limited_times(*seen, outside, backward, 0.5)
    assert sum(part.sum() for part in found) == pytest.approx(sum(part.sum() for part in seen))


def test_steps_that_something_else_bounds_stay_as_they_are():
    outside, backward = used(20)
    seen = 5.0 * outside, 5.0 * backward
    for found, given in zip(quota_limited_times(*seen, outside, backward, 0.5), seen, strict=True):
        assert found is given


def test_steps_with_no_processor_time_stay_as_they_are():
    seen, none = np.ones(4), np.zeros(4)
    assert quota_limited_times(seen, seen, none, none, 0.5) == (seen, seen)
