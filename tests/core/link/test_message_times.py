"""Latency and rate are told apart by messages of different sizes, whatever jitter, and kept where the link changes."""

import numpy as np
import pytest

from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_times import LatencySettings, MessageTimes

LATENCY, RATE = 3e-3, 2e7
MEASURED = MessageTimes((LinkEstimate(),) * 2, latency=1e-3)  # before training, when ranks had nothing else to do


def seen(times, sizes, rate=RATE, jitter=0.0, rng=None):
    """With messages of these sizes on a link, of which the second worker's is half as fast."""
    for num_bytes in sizes:
        seconds = LATENCY + num_bytes / np.array([rate, rate / 2])
        times = times.observe(num_bytes, seconds if rng is None else seconds * rng.lognormal(0.0, jitter, 2))
    return times


def test_two_sizes_tell_latency_and_rate():
    times = seen(MEASURED, [2e5] * 4 + [2e4] * 8)
    assert times.latency == pytest.approx(LATENCY, rel=0.1)
    assert times.links[1].rate == pytest.approx(RATE / 2, rel=0.15)


def test_one_size_tells_no_latency_and_leaves_it_uncertain():
    one = seen(MEASURED, [2e5] * 9)
    assert one.latency == LatencySettings().busy_factor * MEASURED.latency
    assert one.latency_error == seen(MEASURED, [2e5]).latency_error > 1e-3
    assert seen(one, [2e4]).latency_error < one.latency_error


@pytest.mark.parametrize("seed", range(5))
def test_jitter_moves_it_little_where_sizes_are_near_each_other(seed):
    rng = np.random.default_rng(seed)
    times = seen(MEASURED, [2e5] * 4 + [2e4] * 4)
    sizes = 2e4 * 1.2 ** rng.integers(-2, 3, 40)
    assert seen(times, sizes, jitter=0.05, rng=rng).latency == pytest.approx(LATENCY, rel=0.3)


def test_a_link_that_changes_moves_the_rate_and_hardly_the_latency():
    times = seen(MEASURED, [2e5] * 4 + [2e4] * 8)
    slower = seen(times, [2e4] * 8, rate=RATE / 10)
    assert slower.latency == times.latency
    assert slower.links[0].rate < times.links[0].rate / 4
    both = seen(times, [2e3] * 8, rate=RATE / 10)
    assert LATENCY <= both.latency < 1.6 * LATENCY, "of a change of both at once it takes a part for its own"


def test_latency_is_never_longer_than_messages_take():
    assert MEASURED.observe(64.0, np.array([1e-4, 2e-4])).latency == 2e-4
    assert seen(MEASURED, [2e5, 2e4, 64.0]).observe(64.0, np.array([1e-3, 1e-3])).latency <= 1e-3


@pytest.mark.parametrize("name", ["busy_factor", "first_relative_error", "relative_error", "relative_drift"])
def test_settings_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=name):
        LatencySettings(**{name: -1.0})
