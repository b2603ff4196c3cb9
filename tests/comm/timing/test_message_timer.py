"""Times of messages: the link's own, whoever computes for longest, and whichever link is the thin one."""

import io

import numpy as np
import pytest
import torch

from lightning_hetero.comm.link.link_state import LinkState
from lightning_hetero.comm.timing.message_timer import MessageTimer, message_seconds
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.link.bandwidth import LinkEstimate
from lightning_hetero.core.link.message_times import MessageTimes

BYTES = 1000.0


class Marks:
    """A clock whose marks are given, and which may not be ready yet."""

    def __init__(self):
        self.now, self.pending = 0.0, set()

    def mark(self):
        return self.now

    def ready(self, mark):
        return mark not in self.pending

    def seconds(self, start, end):
        return end - start


def simulated(compute, uplink, steps=20):
    """Tables of ranks that compute for ``compute[i]`` and whose message takes ``uplink[i]`` to every other rank."""
    ranks = len(compute)
    clocks = [Marks() for _ in range(ranks)]
    logs = [MessageTimer(clock, ranks) for clock in clocks]
    for step in range(steps):
        arrived = []
        for rank, clock in enumerate(clocks):
            clock.now += compute[rank]
            arrived.append(logs[rank].send(step, BYTES))
        starts = [clock.now for clock in clocks]
        for rank, clock in enumerate(clocks):
            for peer in sorted(range(ranks), key=lambda peer: peer != rank):
                takes = 0.0 if peer == rank else uplink[peer]
                clock.now = max(clock.now, max(starts[peer], starts[rank]) + takes)
                arrived[rank](peer)
    return np.stack([log.take() for log in logs])


@pytest.mark.parametrize("compute", [(0.1, 0.1), (0.5, 0.1), (0.1, 0.5)], ids=str)
@pytest.mark.parametrize("link", [1e-3, 0.2])
def test_waiting_for_a_slow_worker_is_no_transfer(compute, link):
    num_bytes, seconds = message_seconds(simulated(compute, (link, link)))
    assert num_bytes == BYTES
    assert seconds.max() == pytest.approx(link)


@pytest.mark.parametrize("uplink", [(0.3, 0.01, 0.01), (0.01, 0.3, 0.01), (0.01, 0.01, 0.3)], ids=str)
def test_a_thin_uplink_is_found_by_those_who_wait_for_it(uplink):
    """Its rank goes on first, so that the others are ready last in the next step, and see it alone."""
    _, seconds = message_seconds(simulated((0.1, 0.1, 0.1), uplink))
    assert seconds.max() == pytest.approx(0.3)


def test_messages_under_way_are_reported_later():
    clock = Marks()
    log = MessageTimer(clock, 2)
    arrived = log.send(0, BYTES)
    arrived(0)
    assert np.isnan(log.take()).all(), "one message has not arrived"
    clock.now = 2.0
    arrived(1)
    clock.pending.add(2.0)
    assert np.isnan(log.take()).all(), "the device has not reached the mark"
    clock.pending.clear()
    table = log.take()
    assert table.shape == (SETTINGS.max_steps, 4)
    assert table[0].tolist() == [0, BYTES, 0.0, 2.0]
    assert np.isnan(log.take()).all(), "a step is reported twice"
    assert message_seconds(np.stack([table, log.take()])) is None


def test_a_checkpoint_has_what_is_known_of_the_link():
    watch, later = LinkState(2), LinkState(2)
    watch.times = MessageTimes((LinkEstimate(1e6), LinkEstimate(None)), 1e-3, 1e-4, (BYTES, 0.5))
    file = io.BytesIO()
    torch.save(watch.state_dict(), file)
    file.seek(0)
    later.load_state_dict(torch.load(file, weights_only=True))
    assert later.times == watch.times


def _sent(log, clock, step):
    arrived = log.send(step, BYTES)
    for peer in range(2):
        clock.now += 0.25 * (1 + peer)
        arrived(peer)


def test_links_of_other_workers_are_not_taken_over():
    watch = LinkState(3)
    watch.load_state_dict({**LinkState(2).state_dict(), "latency": 5.0})
    assert (len(watch.links), watch.times.latency) == (3, 0.0)


def test_only_messages_as_large_as_the_newest_count():
    """Two at the former density, one at the present one."""
    table = np.full((SETTINGS.max_steps, 4), np.nan)
    table[:3] = [[1, BYTES, 1.0, 1.0], [2, BYTES, 1.0, 1.0], [3, BYTES / 5, 0.1, 0.1]]
    num_bytes, seconds = message_seconds(np.stack([table, table]))
    assert (num_bytes, seconds.tolist()) == (BYTES / 5, [0.1, 0.1])
