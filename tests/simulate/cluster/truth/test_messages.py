"""Compressed messages: their times against a transcription, and density and staleness by the real planner."""

import numpy as np
import pytest

from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.policies.time_to_accuracy import TimeToAccuracyPlanner
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from lightning_hetero.simulate.cluster.truth.messages import MessageExchange

DEVICES = [DeviceProfile(q=0.35e-3 / v, s=0.02, k=0.65e-3 / v, m=0.02, jitter=0.02) for v in (1.0, 0.4)]
SLOW, FAST = 1.25e6, 62.5e6  # 10 and 500 Mbit/s


def transcribed(compute, takes, stale):
    """End of each step: own gradients, then the messages of this step or, if they are stale, of the one before."""
    starts, arrived, ends = [0.0] * len(compute[0]), -np.inf, []
    for row in compute:
        ready = [start + own for start, own in zip(starts, row, strict=True)]
        before, arrived = arrived, max(max(ready), arrived) + takes
        starts = [max(own, before if stale else arrived) for own in ready]
        ends.append(max(starts))
    return np.diff([0.0, *ends])


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("rate", [1e4, 1e5, 1e6, np.inf])
def test_times_of_messages(rate, stale):
    rng = np.random.default_rng(0)
    link = LinkProfile(gradient_bytes=4e6, rate=rate, latency=0.01)
    exchange = MessageExchange(BlockTopK(density=0.01), link, 3, may_be_stale=True)
    exchange.stale = stale
    compute = rng.exponential(0.5, (200, 3))
    seconds = np.concatenate([exchange.run(part, np.ones(len(part)), clock)[0] for part, clock in [(compute, 0.0)]])
    takes = 0.01 + exchange.bytes_now / rate
    np.testing.assert_allclose(seconds, transcribed(compute, takes, stale), rtol=1e-9, atol=1e-12)
    assert exchange.see().seconds >= takes * (1 - 1e-9)


def test_bytes_are_those_of_the_wire_format():
    exchange = MessageExchange(BlockTopK(density=0.03), LinkProfile(gradient_bytes=64 * 1000), 3)
    assert exchange.bytes_now == 2 * MessageFormat(1000, 10, 16, "bfloat16").num_bytes


def test_messages_become_stale_where_that_pays():
    link = LinkProfile(gradient_bytes=100e6, rate=SLOW, latency=1e-3)
    result = ClusterSimulator(
        DEVICES, 100, link=link, policy=TimeToAccuracyPlanner(), compression=BlockTopK(density=0.05), staleness=1
    ).run(300)
    assert result.stale[-1]
    assert result.seconds[-50:].mean() < result.seconds[10:20].mean()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"compression": "block_topk"}, TypeError, "must be BlockTopK settings"),
        ({"compression": BlockTopK(dense_every=5)}, ValueError, "dense_every=5 is not simulated"),
        ({"compression": BlockTopK(), "staleness": 2}, ValueError, "staleness=2"),
        ({"compression": BlockTopK(), "devices": DEVICES[:1]}, ValueError, "needs two workers"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=text):
        ClusterSimulator(**{"devices": DEVICES, "total_batch_size": 100, **wrong})


@pytest.mark.parametrize("rate", [SLOW, FAST])
@pytest.mark.parametrize("stale", [False, True])
def test_without_jitter_steps_take_what_is_said_to_be_exact(stale, rate):
    devices = [DeviceProfile(1e-3, 0.01, 2e-3, 0.01), DeviceProfile(2e-3, 0.01, 4e-3, 0.01)]
    link = LinkProfile(gradient_bytes=100e6, rate=rate, latency=1e-3)
    simulator = ClusterSimulator(devices, 60, link=link, policy="even", compression=BlockTopK(density=0.3), replan=1000)
    simulator.run(3)
    simulator._steps.messages.stale = stale
    result = simulator.run(30)
    np.testing.assert_allclose(result.seconds[10:], result.exact[10:], rtol=1e-6)
    assert simulator.time(simulator.plan) == pytest.approx(result.exact[-1])
    least, sizes = simulator.optimum()
    assert least == pytest.approx(result.optimum[-1])
    assert simulator.time(BatchPlan(60, tuple(sizes.tolist()))) == pytest.approx(least)


def crossing(seconds, workers=2, latency=0.0):
    """Exchange whose messages take so many seconds."""
    exchange = MessageExchange(BlockTopK(density=0.1), LinkProfile(gradient_bytes=4e6), workers, may_be_stale=True)
    exchange.change_link(LinkProfile(4e6, exchange.bytes_now / (seconds - latency), latency))
    return exchange


def test_a_message_goes_at_the_rate_of_the_second_in_which_it_leaves():
    exchange = crossing(3.0)
    rate = exchange.bytes_now / 3.0
    exchange.change_link(LinkProfile(4e6, rate, trace=[(0.5, rate / 2)]))
    ends, _ = exchange.run(np.ones((1, 2)), np.ones(1), clock=0.0)
    np.testing.assert_allclose(ends, [1 + 6])


def test_the_optimum_follows_the_density():
    link = LinkProfile(gradient_bytes=100e6, rate=SLOW)
    devices = [DeviceProfile(1e-3, 0.01, 2e-3, 0.01), DeviceProfile(2e-3, 0.01, 4e-3, 0.01)]
    simulator = ClusterSimulator(devices, 60, link=link, policy="even", compression=BlockTopK(density=0.3))
    simulator.run(5)
    simulator._steps.messages.density = 0.01
    result = simulator.run(5)
    np.testing.assert_allclose(result.exact, result.seconds)
    assert result.optimum[-1] < 0.1 * result.optimum[4]
