"""Whether it is the network that a training waits for: thin links, stalls, slow workers; and how often that is said."""

import numpy as np
import pytest

from lightning_hetero.core.link.diagnosis import KNOWN, WINDOW, LongWait, NetworkBound, network_waits
from lightning_hetero.core.observations import StepObservations

COMPUTE = 0.1


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


def look(state, wait, steps=WINDOW, compute=COMPUTE, **kwargs):
    return state.observe(np.broadcast_to([wait, compute], (steps, 2)), **kwargs)


def with_stall(wait, seconds=5.0, steps=WINDOW):
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
        state, news = NetworkBound().observe(network_waits(observed(arrivals, 0.01)))
        assert (state.kind, news) == (None, None)


def test_one_worker_waits_for_nothing():
    zeros = np.zeros((9, 1))
    alone = StepObservations(zeros + 8, zeros + 0.1, zeros + 0.1, zeros, zeros, zeros, zeros + 0.2)
    assert not network_waits(alone)[:, 0].any()
    assert network_waits(StepObservations.empty(2)).shape == (0, 2)


def test_micro_batches_of_a_step_count_as_computing():
    np.testing.assert_allclose(network_waits(observed([[0.1, 0.1]], 0.5), accumulation=4), [[0.5, 0.4]])


def test_a_thin_link_is_said_once_with_numbers():
    state, news = look(NetworkBound(), 36.0, compute=0.02, steps=KNOWN)
    assert news == "thin"
    assert state.describe(4.7e6) == (
        "network-bound: a step waits for the network for 36 s and computes for 0.02 s; "
        "a worker sends 4.7 MB in it, at about 1.04 Mbit/s"
    )
    for wait in (36.0, 30.0, 45.0):
        state, news = look(state, wait, compute=0.02)
        assert news is None


@pytest.mark.parametrize("steps", [WINDOW, 32])
def test_a_stall_of_one_step_counts(steps):
    state, news = NetworkBound().observe(with_stall(0.01, steps=steps))
    assert news == "stall"
    assert state.describe(4.7e6) == (
        f"network-bound: the network stalled. The longest of {steps} steps waited for it for 5 s, most of the others "
        "for 0.01 s, and a step computes for 0.1 s"
    )
    state, news = look(state, 0.01)
    assert (state.kind, news) == (None, "over")
    assert state.describe().startswith("no longer network-bound: a step waits for the network for 0.01 s")


def test_a_link_that_became_thin_in_between_is_told_by_the_newest_steps():
    """And one that was thin for a while is over it, whose steps count as a stall."""
    rows = np.array([[0.01, COMPUTE]] * 20 + [[4.0, COMPUTE]] * 12)
    state, news = NetworkBound().observe(rows)
    assert (news, state.usual) == ("thin", 4.0)
    assert NetworkBound().observe(rows[::-1])[1] == "stall"


def test_a_stall_may_hold_two_steps():
    rows = with_stall(0.01)
    rows[2] = rows[1]
    assert NetworkBound().observe(rows)[1] == "stall"


def test_what_is_no_longer_than_a_few_steps_of_computing_is_no_stall():
    for compute, found in ((0.9, "stall"), (1.1, None)):
        rows = with_stall(0.01, seconds=5.0, steps=32)
        rows[:, 1] = compute
        assert NetworkBound().observe(rows)[1] == found


def test_hiccups_and_small_sums_are_not_worth_a_word():
    assert NetworkBound().observe(with_stall(0.01, seconds=0.9))[1] is None
    assert look(NetworkBound(), 0.02, compute=0.002)[1] is None


def test_looks_with_few_steps_add_up():
    """As with ``replan=1``: a step that waits long may be a stall, and is a thin link if all do."""
    state, said = NetworkBound(), []
    for _ in range(WINDOW):
        state, news = look(state, 5.0, steps=1)
        said.append(news)
    assert said == [None] * (KNOWN - 1) + ["thin"] + [None] * (WINDOW - KNOWN)
    state, said = NetworkBound(), []
    for wait in (0.01, 0.01, 0.01, 0.01, 5.0, *[0.01] * 10):
        state, news = look(state, wait, steps=1)
        said.append(news)
    assert [news for news in said if news] == ["stall", "over"]
    assert state.stalls == 1


def test_a_link_around_the_bound_is_no_reason_to_go_to_and_fro():
    state, said = NetworkBound(), []
    for wait in (0.95, 1.05, 0.95, 0.75, 1.3, 0.8, 0.6, 0.95, 0.6):
        state, news = look(state, wait * COMPUTE)
        said.append(news)
    assert said == [None, "thin", None, None, None, None, "over", None, None]


def test_it_is_said_again_when_the_numbers_double_or_halve():
    state, said = NetworkBound(), []
    for wait in (1.0, 1.9, 2.1, 3.0, 4.5, 2.0, 2.5):
        state, news = look(state, wait)
        said.append(news)
    assert said == ["thin", None, "thin", None, "thin", "thin", None]


def test_what_comes_and_goes_is_said_ever_more_rarely():
    state, stalls, others = NetworkBound(), [], []
    for _ in range(9):
        state, news = state.observe(with_stall(0.01))
        stalls.append(news)
        state, news = look(state, 0.01)
        others.append(news)
    assert [number for number, news in enumerate(stalls, 1) if news == "stall"] == [1, 2, 4, 8]
    assert [number for number, news in enumerate(others, 1) if news == "over"] == [1, 2, 4, 8]
    state = state.observe(with_stall(0.01))[0]
    assert state.describe().endswith("that happened 10 times by now")


def test_where_others_watch_for_a_thin_link_only_stalls_are_said():
    state, news = look(NetworkBound(), 5.0, lasting=False)
    assert (state.kind, news) == (None, None)
    state, news = state.observe(with_stall(0.01), lasting=False)
    assert news == "stall"
    state, news = look(state, 5.0, lasting=False)
    assert (state.kind, news) == (None, None), "a link that is thin now was said to be over it"


def test_selecting_and_merging_is_no_network():
    """Handling takes half a second of each step, messages 10 ms; in the second step the link stalls."""
    seen = observed([[0.1, 0.1]] * 5, [0.01, 5.0, 0.01, 0.01, 0.01], handling=0.5)
    waits = network_waits(seen, message_seconds=0.01)
    np.testing.assert_allclose(waits[:, 0], [0.01, 5.0, 0.01, 0.01, 0.01])
    assert network_waits(seen, message_seconds=9.0)[0, 0] == pytest.approx(0.51), "messages that nobody waits for"


@pytest.mark.parametrize(
    ("waited", "computed", "left", "said"),
    [(36.0, 0.02, 6, True), (36.0, 0.02, None, True), (36.0, 10.0, 6, False), (0.9, 0.02, None, False)],
)
def test_a_long_wait_of_one_worker_is_worth_a_word_if_it_is_long_to_the_next_look(waited, computed, left, said):
    assert LongWait(waited, computed, waited).worth_saying(left) is said
    assert not LongWait(waited, computed, 0.02).worth_saying(50), "one step among short ones: the look comes soon"


def test_a_long_wait_says_what_is_known():
    text = LongWait(36.0, 0.02, 36.0).describe(4.7e6, 6)
    assert text == (
        "perhaps network-bound: this worker computed for 0.02 s and then waited for gradients for 36 s, in which a "
        "worker sends 4.7 MB: the network is thin or stalled, or another worker fell behind; in 6 steps, a comparison "
        "of the workers will tell"
    )
    assert LongWait(36.0, 0.02, 36.0).describe(4.7e6, None).endswith("or another worker fell behind")
