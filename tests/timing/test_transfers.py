"""Times of buckets and messages on the link, and the clocks by which all is timed."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.timing.bucket_timer import BucketTimer, busy_seconds, combine
from lightning_hetero.comm.timing.clock import agreed_clock
from lightning_hetero.comm.timing.message_timer import MessageTimer, message_seconds
from tests.ranks import run_ranks
from tests.timing.clocks import Hand

# buckets


def play(timer, clock, begin, events):
    """A step of which each bucket is ``(ready, sent, arrived, released)``, in seconds after ``begin``."""
    calls = []
    for index, (ready, sent, arrived, released) in enumerate(events):
        clock.now = begin + ready
        release = timer.ready(index)
        clock.now = begin + sent
        calls += [(begin + arrived, timer.send()), (begin + released, release)]
    for clock.now, call in sorted(calls, key=lambda pair: pair[0]):
        call()


def rows(table):
    return table[np.isfinite(table[:, 0])].tolist()


ONE = [(1.0, 1.0, 1.5, 1.5), (2.0, 2.0, 3.0, 3.0)]


def test_rows_of_buckets_by_hand():
    """The second step begins at 3, after the first; nobody waits for its second sum, which comes late."""
    clock = Hand()
    timer = BucketTimer(clock)
    play(timer, clock, 0.0, ONE)
    play(timer, clock, 3.0, [(1.0, 1.0, 1.5, 1.5), (2.0, 2.0, 4.0, 2.0)])
    assert rows(timer.take(2)) == [[2.0, 2.5, 1.0, 2.0]]
    assert rows(timer.take(2)) == [], "a row was reported twice"
    play(timer, clock, 5.0, [(1.0, 1.0, 2.25, 2.25), (2.0, 2.0, 3.0, 2.5)])
    assert rows(timer.take(2)) == [[3.0, 1.0, 1.0, 2.0]], "seconds in which the link carried the step before"
    play(timer, clock, 9.0, ONE)
    clock.reached = 11.5
    assert rows(timer.take(2)) == [], "a step waits for its last mark"
    assert [span[:2] for span in timer.spans()] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)]
    assert timer.spans()[3][2:] == (1.0, 1.0, 3.0)
    clock.reached = float("inf")
    assert rows(timer.take(3)) == [], "another layout is left out"
    assert [row[0] for row in rows(timer.take(2))] == [4.0]
    timer.gap()
    for begin in (15.0, 20.0):
        play(timer, clock, begin, ONE)
    assert [row[0] for row in rows(timer.take(2))] == [7.0], "none is measured from a step that was not"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=6), st.integers(-1, 20))
def test_a_link_is_busy_while_it_carries_something(given, until):
    spans = [(float(start), float(start + length)) for start, length in given]
    seconds = {second for start, end in spans for second in range(int(start), int(end)) if second >= until}
    assert busy_seconds(spans, float(until)) == len(seconds)


def test_ranks_are_matched_by_step_and_the_last_one_counts(seed):
    rng, ranks, steps, buckets = np.random.default_rng(seed), 3, 6, 2
    tables, known = np.full((ranks, 32, 2 + buckets), np.nan), rng.random((ranks, steps, 1 + buckets))
    have = rng.random((ranks, steps)) < 0.8
    have[:, 2] = True
    for table, values, mine in zip(tables, known, have, strict=True):
        for place, step in enumerate(np.flatnonzero(mine)):
            table[place] = [step + 10, *values[step]]
    common = have.all(0)
    busy, ready = combine(tables)
    assert busy == np.median(known[:, common, 0].min(0))
    np.testing.assert_array_equal(ready, np.maximum.accumulate(np.median(known[:, common, 1:].max(0), axis=0)))
    tables[0, :, 0] += 100
    assert combine(tables) is None


# messages


BYTES = 1000.0


def simulated(compute, uplink, steps=20):
    """Tables of ranks that compute for ``compute[i]`` and whose message takes ``uplink[i]`` to every other rank."""
    ranks = len(compute)
    clocks = [Hand() for _ in range(ranks)]
    timers = [MessageTimer(clock, ranks) for clock in clocks]
    for step in range(steps):
        arrived = []
        for rank, clock in enumerate(clocks):
            clock.now += compute[rank]
            arrived.append(timers[rank].send(step, BYTES))
        starts = [clock.now for clock in clocks]
        for rank, clock in enumerate(clocks):
            for peer in sorted(range(ranks), key=lambda peer: peer != rank):
                clock.now = max(clock.now, max(starts[peer], starts[rank]) + (0.0 if peer == rank else uplink[peer]))
                arrived[rank](peer)
    return np.stack([timer.take() for timer in timers])


@pytest.mark.parametrize(("slow", "thin"), [(0, 0), (0, 1), (1, 2), (None, 2)])
def test_a_thin_uplink_is_found_and_waiting_for_a_slow_worker_is_no_transfer(slow, thin):
    """The rank that is ready last waits for nobody, and sees the link alone."""
    compute = [0.5 if rank == slow else 0.1 for rank in range(3)]
    num_bytes, seconds = message_seconds(simulated(compute, [0.3 if rank == thin else 0.01 for rank in range(3)]))
    assert num_bytes == BYTES
    assert seconds.max() == pytest.approx(0.01 if slow == thin else 0.3)


def test_messages_under_way_are_reported_later_and_only_those_of_the_newest_size_count():
    clock = Hand()
    timer = MessageTimer(clock, 2)
    arrived = timer.send(0, BYTES)
    arrived(0)
    assert rows(timer.take()) == [], "one message has not arrived"
    clock.now = 2.0
    arrived(1)
    assert timer.rows() == [[0, BYTES, 0.0, 2.0]], "a checkpoint has them, and leaves them"
    table = timer.take()
    assert rows(table) == [[0, BYTES, 0.0, 2.0]]
    assert message_seconds(np.stack([table, timer.take()])) is None, "a step is reported once"
    for step, num_bytes in enumerate((BYTES, BYTES, BYTES / 5)):
        arrived = timer.send(step, num_bytes)
        for peer in range(2):
            clock.now += num_bytes / BYTES
            arrived(peer)
    table = timer.take()
    num_bytes, seconds = message_seconds(np.stack([table, table]))
    assert (num_bytes, seconds.tolist()) == (BYTES / 5, pytest.approx([0.2, 0.4]))


@pytest.mark.parametrize(("newest", "seconds"), [((0.1, 2.5), 0.1), ((2.5, 2.5), 2.5)])
def test_two_long_messages_are_a_slow_link_however_many_short_ones_came_before(newest, seconds):
    table = np.array([[step, BYTES, 0.0, took] for step, took in enumerate((*[0.1] * 9, *newest))])
    assert message_seconds(np.stack([table, table]))[1].tolist() == [0.0, seconds]


# clocks


def _agreed(rank, cases):
    dist.init_process_group("gloo")
    found, control = [], ControlPlane(rank, 2)
    for backend, kinds in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda *_, backend=backend: backend)
            try:
                found.append(type(agreed_clock(torch.device(kinds[rank]), control)).__name__)
            except ValueError as error:
                found.append(str(error))
    return found


def test_a_device_without_a_clock_or_a_backend_is_refused_on_every_rank():
    plain = "cpu:gloo,cuda:gloo"
    cases = [(plain, ("cpu", "cuda:0")), (plain, ("cpu", "xpu")), ("cpu:gloo", ("cpu", "cuda:0"))]
    for rank, (good, kind, backend) in enumerate(run_ranks(_agreed, 2, cases)):
        assert good == ("HostClock", "CudaClock")[rank]
        assert "rank 1" in kind
        assert "xpu" in kind
        assert "process_group_backend" in backend
