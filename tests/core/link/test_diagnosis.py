"""Whether training is communication-bound: slow links, stalls, stragglers; and how often that is said."""

import numpy as np
import pytest

from lightning_hetero.core.link.diagnosis import CommunicationBound, DiagnosisSettings, network_waits
from lightning_hetero.core.observations import StepObservations

COMPUTE = 0.1
ROUND = 8
"""Steps of a sync round."""
FEWEST = DiagnosisSettings().min_steps


def observed(arrival, transfer, *, buckets=2, handling=0.0):
    """Workers that are ready after ``arrival`` (steps, workers), and sums that take ``transfer`` seconds from the last.

    Of two buckets, the first is ready at half the backward pass, and the second crosses the link behind it.
    """
    arrival = np.asarray(arrival, dtype=float)
    transfer = np.broadcast_to(np.asarray(transfer, dtype=float), len(arrival))
    backward = 0.5 * arrival
    last = arrival.max(axis=1) + transfer
    before = np.maximum(
        arrival - 0.25 * arrival, last[:, None] - transfer[:, None] / buckets
    )  # the one before is there
    wait = last[:, None] - np.maximum(arrival, before) + handling
    ends = (last[:, None] + handling - arrival + backward)[:, :, None]
    zeros = np.zeros_like(arrival)
    return StepObservations(
        zeros + 8, 0.5 * arrival, backward, 0.5 * backward, zeros, wait, zeros + np.nan, bucket_ends=ends
    )


def look(state, wait, steps=ROUND, compute=COMPUTE, **kwargs):
    return state.observe(np.broadcast_to([wait, compute], (steps, 2)), **kwargs)


def with_stall(wait, seconds=5.0, steps=ROUND):
    rows = np.broadcast_to([wait, COMPUTE], (steps, 2)).copy()
    rows[1, 0] = seconds
    return rows


def test_the_wait_is_that_of_the_worker_that_comes_last():
    """Whichever that is, and however many buckets share the time."""
    arrivals = [[0.1, 3.0], [3.0, 0.1], [0.1, 0.1]]
    for buckets in (1, 2, 10):
        waits = network_waits(observed(arrivals, [0.2, 0.2, 5.0], buckets=buckets))
        np.testing.assert_allclose(waits, [[0.2, 3.0], [0.2, 3.0], [5.0, 0.1]])


def test_a_slow_worker_is_no_slow_network():
    """The fast one waits for ten times as long as it computes, in all steps, or for seconds in one."""
    for arrivals in ([[0.1, 1.1]] * 20, [[0.1, 0.1]] * 19 + [[0.1, 6.0]]):
        state, news = CommunicationBound().observe(network_waits(observed(arrivals, 0.01)))
        assert (state.bound, news) == (False, False)


def test_one_worker_waits_for_nothing():
    zeros = np.zeros((9, 1))
    alone = StepObservations(zeros + 8, zeros + 0.1, zeros + 0.1, zeros, zeros, zeros, zeros + 0.2)
    assert not network_waits(alone)[:, 0].any()
    assert network_waits(StepObservations.empty(2)).shape == (0, 2)


def test_micro_batches_of_a_step_count_as_computing():
    np.testing.assert_allclose(network_waits(observed([[0.1, 0.1]], 0.5), accumulation=4), [[0.5, 0.4]])


def test_a_slow_link_is_said_once_with_numbers():
    state, news = look(CommunicationBound(), 36.0, compute=0.02, steps=FEWEST)
    assert news
    assert state.describe(4.7e6) == (
        "communication-bound: a step waits for the network for 36 s (median 36 s, longest 36 s) and computes for 0.02 "
        "s; a worker sends 4.7 MB in it, at about 1.04 Mbit/s"
    )
    for wait in (36.0, 30.0, 45.0):
        state, news = look(state, wait, compute=0.02)
        assert (state.bound, news) == (True, False)


@pytest.mark.parametrize("steps", [ROUND, 32])
def test_a_stall_of_one_step_counts(steps):
    """If steps wait for longer than they compute because of it; no rate of the link follows from that."""
    state, news = CommunicationBound().observe(with_stall(0.01, steps=steps))
    assert (news, state.lasting) == (True, False)
    assert f"{state.wait:.3g} s (median 0.01 s, longest 5 s) and computes for 0.1 s" in state.describe(4.7e6)
    assert state.describe(4.7e6).endswith("; a worker sends 4.7 MB in it")
    state, news = look(state, 0.01)
    assert (state.bound, news) == (False, True)
    assert state.describe(4.7e6) == (
        "no longer communication-bound: a step waits for the network for 0.01 s (median 0.01 s, longest 0.01 s) and "
        "computes for 0.1 s"
    )


def test_hiccups_and_small_sums_are_not_worth_a_word():
    assert not CommunicationBound().observe(with_stall(0.01, seconds=0.9))[1]
    assert not look(CommunicationBound(), 0.02, compute=0.002)[1]


def test_looks_with_few_steps_add_up():
    """As with ``replan=1``, where a step that waits long is followed by the next sync round."""
    state, said = CommunicationBound(), []
    for _ in range(ROUND):
        state, news = look(state, 5.0, steps=1)
        said.append(news)
    assert said == [False] * (FEWEST - 1) + [True] + [False] * (ROUND - FEWEST)
    state, said = CommunicationBound(), []
    for wait in (0.01, 0.01, 0.01, 0.01, 5.0, *[0.01] * 10):
        state, news = look(state, wait, steps=1)
        said.append(news and state.bound)
    assert said.count(True) == 1
    assert not state.bound
    assert state.observe(np.zeros((0, 2))) == (state, False), "a sync round without a step"


def test_a_link_around_the_bound_is_no_reason_to_go_to_and_fro():
    state, said = CommunicationBound(), []
    for wait in (0.95, 1.05, 0.95, 0.75, 1.3, 0.8, 0.6, 0.95, 0.6):
        state, news = look(state, wait * COMPUTE)
        said.append((news, state.bound))
    assert [number for number, (news, _) in enumerate(said) if news] == [1, 6]
    assert (said[1], said[6]) == ((True, True), (True, False))


def test_it_is_said_again_when_the_numbers_double():
    state, said = CommunicationBound(), []
    for wait in (1.0, 1.9, 2.1, 3.0, 4.5, 2.0, 2.5):
        state, news = look(state, wait)
        said.append(news)
    assert said == [True, False, True, False, True, False, False]


def test_it_is_said_again_when_it_comes_back():
    state, said = CommunicationBound(), []
    for wait in (1.0, 0.01, 1.0):
        state, news = look(state, wait)
        said.append((news, state.bound))
    assert said == [(True, True), (True, False), (True, True)]


def test_where_others_watch_for_a_thin_link_only_stalls_are_said():
    state, news = look(CommunicationBound(), 5.0, lasting=False)
    assert (state.bound, news) == (False, False)
    state, news = state.observe(with_stall(0.01), lasting=False)
    assert (state.bound, news) == (True, True)
    state, news = look(state, 5.0, lasting=False)
    assert (state.bound, news) == (False, False), "a link that is thin now was said to be over it"


def test_selecting_and_merging_is_no_network():
    """Handling takes half a second of each step, messages 10 ms; in the second step the link stalls."""
    seen = observed([[0.1, 0.1]] * 5, [0.01, 5.0, 0.01, 0.01, 0.01], handling=0.5)
    waits = network_waits(seen, message_seconds=0.01)
    np.testing.assert_allclose(waits[:, 0], [0.01, 5.0, 0.01, 0.01, 0.01])
    assert network_waits(seen, message_seconds=9.0)[0, 0] == pytest.approx(0.51), "messages that nobody waits for"
