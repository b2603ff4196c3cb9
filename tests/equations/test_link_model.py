"""The link that gradients cross: rates, latency, stale buckets, clusters, and when training waits for the network."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.link.bandwidth import LinkEstimate, idle_rate
from lightning_hetero.core.link.clusters import check_clusters, check_hierarchy, clusters_by_name, clusters_by_time
from lightning_hetero.core.link.diagnosis import CommunicationBound, network_waits
from lightning_hetero.core.link.message_link import MessageLink
from lightning_hetero.core.link.message_size import MessageSize
from lightning_hetero.core.link.message_times import MessageTimes
from lightning_hetero.core.link.staleness import BucketTimes, choose_synchronous
from lightning_hetero.core.observations import StepObservations

# rates


@given(st.floats(1e3, 1e10), st.floats(1e3, 1e10))
def test_seconds_per_byte_are_averaged_and_a_slower_link_is_believed_sooner(old, new):
    weight = 0.8 if new < old else 0.5
    assert LinkEstimate(old).observe(new).rate == pytest.approx(1 / ((1 - weight) / old + weight / new))
    assert LinkEstimate().observe(new).rate == new
    for nothing in (0.0, -1.0, float("nan"), float("inf")):
        assert LinkEstimate(old).observe(nothing) == LinkEstimate(old)
    assert LinkEstimate(old).seconds(new) == pytest.approx(new / (0.9 * old))


@pytest.mark.parametrize("truth", [2e5, 5e7])
def test_the_idle_rule_finds_the_rate_from_either_side(truth):
    """S sec. 4.1: up by 5 % while workers idle for less than 5 % of a step, else down by 20 %."""
    rate, believed = 3e6, []
    for _ in range(200):
        waiting = max(0.1 * rate / truth - 0.1, 0.0)  # what is believed to fit into a step of 0.1 s
        rate = idle_rate(rate, waiting / (0.1 + waiting))
        believed.append(rate)
    assert 0.7 * truth < np.median(believed[100:]) < 1.1 * truth
    assert [idle_rate(100.0, share) for share in (0.0499, 0.05)] == pytest.approx([105, 80])


# latency and rate by messages of two sizes

LATENCY, RATE = 3e-3, 2e7
MEASURED = MessageTimes(latency=1e-3)  # before training, when ranks had nothing else to do


def seen(times, sizes, rate=RATE, jitter=0.0, rng=None):
    """With messages of these sizes on a link, of which the second worker's is half as fast."""
    for num_bytes in sizes:
        seconds = LATENCY + num_bytes / np.array([rate, rate / 2])
        times = times.observe(num_bytes, seconds if rng is None else seconds * rng.lognormal(0.0, jitter, 2))
    return times


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_two_sizes_tell_latency_and_rate_whatever_jitter(seed, jitter):
    rng = np.random.default_rng(seed)
    times = seen(MEASURED, [2e5] * 4 + [2e4] * 8)
    assert times.latency == pytest.approx(LATENCY, rel=0.1)
    assert times.rates[1] == pytest.approx(RATE / 2, rel=0.15)
    near = seen(times, 2e4 * 1.2 ** rng.integers(-2, 3, 40), jitter=jitter, rng=rng)
    assert near.latency == pytest.approx(LATENCY, rel=0.3)


# messages as planners see them

SIZE = MessageSize(1_000_000, 2, parts=(), listed=0, marked=0, marked_from=2.0, align=1)  # 1e6 * density


def test_the_slowest_worker_counts():
    link = MessageLink(0.1, SIZE, (3e6, 1e6, 2e6), latency=0.25)
    assert link.transfer(0.5) == pytest.approx(0.25 + 0.5)
    assert link.bytes_now == 1e5


def test_a_rate_falls_at_once_and_rises_slowly_after_a_message_before_training():
    times = MEASURED.begun(1e6, 1e-3 + 0.1, 2)
    assert times.rates == pytest.approx((1e7, 1e7))
    times = seen(times, [1e5] * 3, rate=2e5)
    assert times.rates == pytest.approx((2e5, 1e5), rel=0.3)
    for _ in range(3):
        before, times = times, seen(times, [1e5], rate=2e7)
        assert times.rates[0] == pytest.approx(1 / (0.95 / before.rates[0] + 0.05 / 2e7), rel=0.02)


# which buckets are stale

seconds = st.floats(0.0, 10.0)
links = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6).map(
    lambda pairs: BucketTimes(tuple(np.cumsum([a for a, _ in pairs]) + 0.1), tuple(b for _, b in pairs))
)


@pytest.mark.parametrize(
    ("transfer", "fresh", "step"),
    [
        ((1.0, 1.0), 2, 5.0),  # the last bucket is ready at 4 and travels for 1
        ((1.0, 1.0), 1, 4.0),  # the first is ready at 3 and there at 4
        ((6.0, 4.0), 0, 10.0),  # the link is busy all the time
        ((6.0, 4.0), 2, 13.0),  # and idle for the 3 s before the first bucket
    ],
)
def test_step_times_by_hand(transfer, fresh, step):
    assert BucketTimes((3.0, 4.0), transfer).step_time(fresh) == pytest.approx(step)
    assert BucketTimes((3.0, 4.0), transfer).slowed(2.0).transfer == tuple(2 * t for t in transfer)


@given(links)
def test_as_many_are_fresh_as_fit(times):
    """From the state with everything fresh: the most that cost nothing, by trying all; or all, for want of a gain."""
    n = len(times.ready)
    steps = [times.step_time(fresh) for fresh in range(n + 1)]
    assert all(later >= earlier - 1e-9 for earlier, later in zip(steps, steps[1:], strict=False))
    assert steps[0] >= max(times.compute, sum(times.transfer)) - 1e-9
    most = max(fresh for fresh in range(n + 1) if steps[fresh] <= 1.02 * steps[0])
    choice = choose_synchronous(times, n)
    gains = steps[most] <= (1 - 0.03) * steps[n]
    assert choice.synchronous == (most if gains else n)
    assert (choice.step_time, choice.all_synchronous) == (steps[choice.synchronous], steps[n])
    bound = sum(times.transfer) > 1.02 * times.compute
    assert choice.communication_bound == bound == ("communication-bound" in choice.describe())


# clusters


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(), st.floats(3.5, 1000))
def test_clusters_are_found_from_times_whatever_the_order_of_ranks(sizes, random, ratio):
    names = [name for name, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(names)
    noise = np.random.default_rng(random.randint(0, 2**32)).uniform(1.0, 1.1, (len(names), len(names)))
    times = np.where(np.equal.outer(names, names), 1e-3, ratio * 1e-3) * (noise + noise.T)
    groups = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
    by_name = tuple(sorted(map(tuple, groups.values())))
    assert tuple(sorted(clusters_by_name(names))) == by_name
    two_kinds = len(sizes) > 1 and max(sizes) > 1
    assert tuple(sorted(clusters_by_time(times))) == (by_name if two_kinds else (tuple(range(len(names))),))


def test_links_that_differ_by_less_than_three_times_are_no_clusters():
    for far, found in ((2.9, ((0, 1, 2),)), (3.1, ((0, 1), (2,)))):
        assert clusters_by_time([[0, 1, far], [1, 0, far], [far, far, 0]]) == found
    assert check_hierarchy([[3], [2, 0, 1]]) == check_clusters(((0, 1, 2), (3,)), 4) == ((0, 1, 2), (3,))
    assert [check_hierarchy(name) for name in (None, "auto")] == [None, "auto"]


@pytest.mark.parametrize(
    ("hierarchy", "error"),
    [("sites", ValueError), ([0, 1, 2], TypeError), ([[0, 1], [1]], ValueError), ([[0, 1.5]], TypeError)],
)
def test_clusters_that_cannot_be_are_refused(hierarchy, error):
    with pytest.raises(error, match="hierarchy="):
        check_hierarchy(hierarchy)
    with pytest.raises(ValueError, match="hierarchy="):
        check_clusters(((0, 1), (2, 3)), 3)


# communication-bound or not

COMPUTE = 0.1


def steps_of(arrival, transfer):
    """Workers that are ready after ``arrival`` (steps, workers), and sums that take ``transfer`` seconds from the last.

    Of two buckets, the first is ready at half the backward pass, and the second crosses the link behind it.
    """
    arrival, transfer = np.array(arrival, dtype=float), np.reshape(transfer, (-1, 1))
    backward, last, zeros = 0.5 * arrival, arrival.max(axis=1, keepdims=True) + transfer, np.zeros_like(arrival)
    wait = last - np.maximum(arrival, np.maximum(0.75 * arrival, last - transfer / 2))
    ends = (last - arrival + backward)[:, :, None]
    return StepObservations(
        zeros + 8, 0.5 * arrival, backward, 0.5 * backward, zeros, wait, zeros + np.nan, bucket_ends=ends
    )


def test_the_wait_is_that_of_the_worker_that_comes_last():
    """Whichever that is: a slow worker is no slow network."""
    waits = network_waits(steps_of([[0.1, 3.0], [3.0, 0.1], [0.1, 0.1]], [0.2, 0.2, 5.0]))
    np.testing.assert_allclose(waits, [[0.2, 3.0], [0.2, 3.0], [5.0, 0.1]])
    for straggling in ([[0.1, 1.1]] * 20, [[0.1, 0.1]] * 19 + [[0.1, 6.0]]):
        state, news = CommunicationBound().observe(network_waits(steps_of(straggling, 0.01)))
        assert (state.bound, news) == (False, False)
    zeros = np.zeros((9, 1))
    alone = StepObservations(zeros + 8, zeros + 0.1, zeros + 0.1, zeros, zeros, zeros, zeros + 0.2)
    assert not network_waits(alone)[:, 0].any()
    assert network_waits(StepObservations.empty(2)).shape == (0, 2)


def look(state, wait, compute=COMPUTE):
    return state.observe(np.broadcast_to([wait, compute], (8, 2)))


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ((0.95, 1.05, 0.95, 0.75, 1.3, 0.8, 0.6, 0.95, 0.6), {1: True, 6: False}),  # around the bound not to and fro
        ((1.01, 1.9, 2.1, 3.0, 4.5, 2.0, 2.5), {0: True, 2: True, 4: True}),  # again when the numbers double
        ((10.0, 0.1, 10.0), {0: True, 1: False, 2: True}),
    ],
)
def test_what_is_said_of_a_link_and_when(waits, expected):
    """By the waits of sync rounds in units of computing."""
    state, said = CommunicationBound(), {}
    for number, wait in enumerate(waits):
        state, news = look(state, wait * COMPUTE)
        if news:
            said[number] = state.bound
    assert said == expected
    assert not look(CommunicationBound(), 0.02, compute=0.002)[1], "jitter of a busy machine"
