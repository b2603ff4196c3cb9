"""Links: times of the ring, a rate that moves, bad input."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.simulate import LinkProfile


def test_a_ring_sends_twice_all_but_one_share():
    link = LinkProfile(gradient_bytes=8e6, rate=1e6, latency=0.25, buckets=4)
    for workers in (2, 3, 10, 10_000):
        np.testing.assert_allclose(link.seconds(workers), 0.25 + 2 * (workers - 1) / workers * 2e6 / 1e6)
    assert link.seconds(1).tolist() == [0.0] * 4


def test_buckets_are_ready_from_gamma_to_the_end():
    assert LinkProfile(buckets=3, gamma=0.5).ready_shares.tolist() == [0.5, 0.75, 1.0]
    assert LinkProfile(buckets=1, gamma=0.5).ready_shares.tolist() == [1.0]


TRACES = st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 10.0)), max_size=5)


@settings(deadline=None)
@given(TRACES, st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.1, 10.0))
def test_a_transfer_takes_until_its_bytes_are_sent(gaps, start, num_bytes, rate):
    """Against a sum over the pieces of the trace."""
    seconds, trace = 0.0, []
    for gap, piece in gaps:
        seconds += gap
        trace.append((seconds, piece))
    link = LinkProfile(rate=rate, trace=trace)
    end = start + link.transfer(num_bytes, start)
    edges = [start, *(at for at, _ in trace if start < at < end), end]
    sent = sum((there - here) * link.rate_at(here) for here, there in zip(edges, edges[1:], strict=False))
    assert math.isclose(sent, num_bytes, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"gradient_bytes": -1}, ValueError, "gradient_bytes=-1 is out of range"),
        ({"rate": 0.0}, ValueError, r"rate=0.0 is out of range; .* 100 Mbit/s are 12.5e6"),
        ({"rate": "100Mbit"}, TypeError, "rate='100Mbit' is a str"),
        ({"latency": math.nan}, ValueError, "latency=nan"),
        ({"buckets": 0}, ValueError, "buckets=0 is too small; give an integer >= 1"),
        ({"gamma": 1.5}, ValueError, "gamma=1.5 is out of range; give a number from 0.0 to 1.0"),
        ({"jitter": -0.1}, ValueError, "jitter=-0.1"),
        ({"trace": 5}, TypeError, "trace=5 must be pairs"),
        ({"trace": [(1.0, 2.0, 3.0)]}, TypeError, "must be pairs"),
        ({"trace": [(1.0, 0.0)]}, ValueError, "rate 0 of trace=0.0"),
        ({"trace": [(2.0, 1.0), (1.0, 1.0)]}, ValueError, "increasing order"),
        ({"trace": [(1.0, 2.0), (1.0, 3.0)]}, ValueError, "each once"),
    ],
)
def test_bad_input_is_named(wrong, error, text):
    with pytest.raises(error, match=text):
        LinkProfile(**wrong)
