"""State of a link: the same estimates on all ranks, from their own tables of messages, also after a checkpoint."""

import json

import numpy as np
import pytest

from lightning_hetero.comm.link.link_state import LinkState
from lightning_hetero.core.link.message_size import MessageSize

SIZE = MessageSize(1000, 2, parts=(32,), listed=80, marked=125)


def seen(num_bytes, *seconds):
    """Messages of one step in the tables of two ranks: step, bytes, and what each rank's message took for it."""
    return np.array([[1.0, num_bytes, *seconds]] * 2)


def test_nothing_is_known_before_the_first_messages():
    watch = LinkState(2)
    watch.begin(0.001)
    assert watch.metrics([0, 1]) == {}
    link = watch.link(0.1, SIZE, stale=False, may_be_stale=True, step=5)
    assert (link.rates, link.seconds, link.latency, link.may_be_stale, link.step) == ((), None, 0.001, True, 5)


def test_the_slowest_rank_is_the_rate_of_the_link():
    watch = LinkState(2)
    watch.see(seen(1e6, 0.5, 0.25))
    metrics = watch.metrics([0, 3])
    assert metrics["hetero/bandwidth/rank0"] == pytest.approx(2e6)
    assert metrics["hetero/bandwidth/rank3"] == pytest.approx(4e6)
    assert metrics["hetero/bandwidth"] == metrics["hetero/bandwidth/rank0"]
    assert metrics["hetero/transfer_time"] == 0.5


def test_a_round_without_messages_keeps_the_rates():
    watch = LinkState(2)
    watch.see(seen(1e6, 0.5, 0.25))
    rates = [link.rate for link in watch.links]
    watch.see(np.full((2, 4), np.nan)[:, :0])
    assert [link.rate for link in watch.links] == rates
    assert watch.seconds is None


def test_state_goes_through_json_to_as_many_ranks_and_to_no_others():
    watch, same, more = LinkState(2), LinkState(2), LinkState(3)
    watch.begin(0.002)
    watch.see(seen(1e6, 0.5, 0.25))
    state = json.loads(json.dumps(watch.state_dict()))
    same.load_state_dict(state)
    more.load_state_dict(state)
    assert same.times == watch.times
    assert all(link.rate is None for link in more.links)
