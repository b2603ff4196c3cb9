"""Times of simulated steps, their optimum and their messages against transcriptions written from the papers."""

import itertools

import numpy as np
import pytest

from lightning_hetero.compression.wire_format import message_size
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.simulate import ClusterSimulator, DeviceProfile, LinkProfile
from tests.simulate.planners import Watching


def bucket_ends(a, p, shares, seconds):
    """One step: a bucket leaves when the last worker has it and the link is free."""
    free, ends = 0.0, []
    for share, takes in zip(shares, seconds, strict=True):
        there = max(own_a + own_p * share for own_a, own_p in zip(a, p, strict=True))
        free = max(free, there) + takes
        ends.append(free)
    return ends


def seen_by(worker, a, p, shares, ends):
    """Synchronization of the buckets before the last, and of the last, as one worker's timer sees it."""
    waited = []
    for j, end in enumerate(ends):
        begins = a[worker] + p[worker] * shares[j]
        waited.append(end - (begins if j == 0 else max(begins, ends[j - 1])))
    return sum(waited[:-1]), waited[-1]


def drawn(rng, workers, **more):
    """Devices of which some parts take no time, and a link that may take none."""
    scale = rng.choice([0.0, 0.1, 1.0], 4, p=[0.1, 0.3, 0.6])
    devices = [DeviceProfile(*(rng.exponential(1.0, 4) * scale), **more) for _ in range(workers)]
    rate, buckets = rng.choice([1e5, 1e6, 1e9]), int(rng.integers(1, 6))
    return devices, LinkProfile(1e6, rate, latency=rng.choice([0.0, 0.1]), buckets=buckets, gamma=rng.random())


def passes(device, size):
    return device.q * size + device.s, device.k * size + device.m


KINDS = (
    {},
    {"jitter": 0.1},
    {"round_jitter": 0.1, "round_passes": 5},
    {"jitter": 0.05, "round_jitter": 0.02, "slowdown": {7: 2.0, 19: 0.5}},
    {"jitter": 0.05, "slowdown": {0: 3.0, 10: 1.0}, "gradual": True},
)


@pytest.mark.parametrize("more", KINDS, ids=str)
def test_steps_are_those_of_their_events_and_timers_see_them(more, seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        workers, steps = int(rng.integers(1, 7)), 24
        devices, link = drawn(rng, workers, **more)
        sizes, planner = rng.integers(1, 9, workers).tolist(), Watching()
        simulator = ClusterSimulator(devices, sum(sizes), link=link, policy=planner, replan=steps, seed=seed)
        simulator.adopt(BatchPlan(sum(sizes), tuple(sizes)))
        result = simulator.run(steps)
        (rows, _), shares, seconds = planner.seen[0], link.ready_shares, link.seconds(workers)
        times = [list(itertools.islice(device.factors(seed + i), steps)) for i, device in enumerate(devices)]
        parts = [passes(device, size) for device, size in zip(devices, sizes, strict=True)]
        first = steps - rows.num_steps
        assert rows.num_steps >= 20
        for t in range(steps):
            a, p = zip(*((x * own[t][0], y * own[t][1]) for (x, y), own in zip(parts, times, strict=True)), strict=True)
            ends = bucket_ends(a, p, shares, seconds)
            assert result.seconds[t] == pytest.approx(ends[-1], rel=1e-9)
            np.testing.assert_allclose(result.idle[t] * ends[-1], ends[-1] - np.add(a, p), atol=1e-5 * ends[-1] + 1e-12)
            slow = [device.slowdown_at(t) for device in devices]
            plain = [[factor * part[j] for factor, part in zip(slow, parts, strict=True)] for j in (0, 1)]
            assert result.exact[t] == pytest.approx(bucket_ends(*plain, shares, seconds)[-1], rel=1e-9)
            for i in range(workers if t >= first else 0):
                row = (t - first, i)
                found = [rows.forward[row], rows.backward[row], rows.overlapped_sync[row], rows.last_sync[row]]
                np.testing.assert_allclose(found, [a[i], p[i], *seen_by(i, a, p, shares, ends)], rtol=1e-9, atol=1e-9)
                np.testing.assert_allclose(rows.bucket_ends[row], np.array(ends) - a[i], atol=1e-9)


def test_the_jitter_of_the_link_is_on_latency_and_bytes():
    nothing, factors = [DeviceProfile(0.0, 0.0, 0.0, 0.0)] * 2, []
    for latency, rate in ((0.1, 1e6), (0.0, 1e5)):
        link = LinkProfile(gradient_bytes=1e6, rate=rate, latency=latency, jitter=0.2)
        seconds = ClusterSimulator(nothing, 20, link=link, policy="even", seed=3).run(400).seconds
        factors.append(seconds / link.seconds(2).sum())
    assert np.std(factors[0]) == pytest.approx(0.2, rel=0.15)
    np.testing.assert_allclose(factors[1], factors[0])


def test_the_rate_of_a_link_along_its_trace():
    link = LinkProfile(gradient_bytes=1e6, rate=1e6, buckets=2, trace=[(10.0, 1e5)])
    devices = [DeviceProfile(0.35e-3, 0.01, 0.65e-3, 0.01)] * 2
    result = ClusterSimulator(devices, 20, link=link, policy="even").run(20)
    before, after = result.clock < 10.0, result.clock - result.seconds > 10.0
    assert np.ptp(result.seconds[before]) < 1e-9
    np.testing.assert_allclose(result.seconds[after], result.exact[after], atol=1e-9)
    assert result.seconds[after].min() > 5 * result.seconds[before].max()
    constant = ClusterSimulator(devices, 20, link=LinkProfile(1e6, 1e6, buckets=2), policy="even").run(3)
    np.testing.assert_allclose(constant.seconds, result.seconds[:3])


# the optimum


def splits(total, least, most):
    """All integer splits within bounds."""
    ranges = [range(least, min(high, total) + 1) for high in most]
    return [sizes for sizes in itertools.product(*ranges) if sum(sizes) == total]


def test_no_split_is_better(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        workers, total, least = int(rng.integers(1, 4)), int(rng.integers(6, 13)), int(rng.integers(1, 3))
        devices, link = drawn(rng, workers)
        memory = rng.integers(-(-total // workers), total + 1, workers).tolist()
        given = [DeviceProfile(d.q, d.s, d.k, d.m, memory=most) for d, most in zip(devices, memory, strict=True)]
        found, sizes = ClusterSimulator(given, total, link=link, min_local=least).optimum()

        def seconds(split, devices=devices, link=link):
            a, p = zip(*map(passes, devices, split), strict=True)
            return bucket_ends(a, p, link.ready_shares, link.seconds(len(split)))[-1]

        assert found == pytest.approx(min(seconds(split) for split in splits(total, least, memory)), rel=1e-9)
        assert seconds(sizes.tolist()) == pytest.approx(found, rel=1e-9)
        assert tuple(sizes.tolist()) in splits(total, least, memory)


@pytest.mark.parametrize("total", [1, 11])
def test_a_total_that_fits_no_split_is_named(total):
    simulator = ClusterSimulator([DeviceProfile(1, 0, 0, 0, memory=5)] * 2, 4)
    with pytest.raises(ValueError, match=f" {total} "):
        simulator.optimum(total)


# messages


def message_ends(compute, send, stale):
    """End of each step: own gradients, then the messages of this step or, if they are stale, of the one before."""
    starts, arrived, ends = [0.0] * len(compute[0]), -np.inf, []
    for t, row in enumerate(compute):
        ready = [start + own for start, own in zip(starts, row, strict=True)]
        before, arrived = arrived, send(t, max(max(ready), arrived))
        starts = [max(own, before if stale[t] else arrived) for own in ready]
        ends.append(max(starts))
    return np.diff([0.0, *ends])


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("rate", [1e5, 1e6, np.inf])
@pytest.mark.parametrize(("jitter", "trace"), [(0.0, ()), (0.3, ()), (0.3, [(3.0, 2e5), (9.0, 8e5)])])
def test_messages_take_the_place_of_sums_at_the_density_that_is_decided(stale, rate, jitter, trace):
    devices = [DeviceProfile(1e-3 * i, 0.01, 2e-3 * i, 0.01, jitter=jitter) for i in (1, 2, 3)]
    link = LinkProfile(gradient_bytes=4e6, rate=rate, latency=0.01, trace=trace)
    planner, steps = Watching(sends=0.02), 60
    sends = {"compression": BlockTopK(density=0.3, warmup_steps=0), "staleness": int(stale)}
    sends |= {"replan": 6, "round_seconds": 0.0}
    simulator = ClusterSimulator(devices, 60, link=link, policy=planner, seed=1, **sends)
    result = simulator.run(steps)
    size = message_size(1_000_000 // BlockTopK().block, BlockTopK().block, BlockTopK().value_dtype, 3)
    num_bytes = [size.bytes(0.3 if t < 6 else 0.02) for t in range(steps)]
    times = [list(itertools.islice(device.factors(1 + i), steps)) for i, device in enumerate(devices)]
    compute = [
        [x * own[t][0] + y * own[t][1] for own, (x, y) in zip(times, (passes(d, 20) for d in devices), strict=True)]
        for t in range(steps)
    ]

    def send(t, leaves):
        return leaves + link.latency + link.transfer(num_bytes[t], leaves)

    assert result.stale.tolist() == [stale] * steps
    np.testing.assert_allclose(result.seconds, message_ends(compute, send, result.stale), rtol=1e-9, atol=1e-12)
    if not jitter:
        np.testing.assert_allclose(result.seconds[20:], result.exact[20:], rtol=1e-6)
        assert simulator.time(simulator.plan) == pytest.approx(result.exact[-1])
        least, sizes = simulator.optimum()
        assert least == pytest.approx(result.optimum[-1])
        assert simulator.time(BatchPlan(60, tuple(sizes.tolist()))) == pytest.approx(least)
        assert result.optimum[-1] <= result.optimum[0]


def test_of_a_message_in_flight_planners_know_nothing():
    """From second 10 on a stale message of 0.5 s takes ten times as long."""
    link = LinkProfile(gradient_bytes=1e6, rate=1.06e5, trace=[(10.0, 1.06e4)])
    planner = Watching()
    simulator = ClusterSimulator(
        [DeviceProfile(0.0, 0.5, 0.0, 0.5)] * 2, 2, link=link, policy=planner, replan=1, round_seconds=0.0,
        compression=BlockTopK(density=0.2, warmup_steps=0), staleness=1,
    )  # fmt: skip
    clock = simulator.run(20).clock
    moments = clock[-len(planner.seen) :]  # warm-up steps say nothing
    slow = [(at, context.link.seconds) for at, (_, context) in zip(moments, planner.seen, strict=True)
            if (context.link.seconds or 0.0) > 2.0]  # fmt: skip
    assert slow[0][0] >= 10.0 + slow[0][1] - 0.5, "known before it arrived"
    assert len([moment for moment in moments if moment < 10.0]) >= 5
