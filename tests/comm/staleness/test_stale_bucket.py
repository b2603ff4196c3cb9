"""A bucket whose sums are stale: two buffers in turn, one sum in flight."""

import pytest
import torch

from lightning_hetero.comm.staleness.stale_bucket import StaleBucket


def bucket():
    return StaleBucket(("a", "b"), [2, 1], 12)


def done(values):
    future = torch.futures.Future()
    future.set_result([torch.tensor(values)])
    return future


def test_two_buffers_take_turns():
    """What is in flight in one must not be overwritten while the other is read."""
    held, like = bucket(), torch.zeros(3)
    places = [held.buffer(like).data_ptr() for _ in range(4)]
    assert len(set(places)) == 2
    assert places[:2] == places[2:]
    assert held.buffer(like).data_ptr() != like.data_ptr()


def test_a_sum_is_taken_once_by_parameter():
    held = bucket()
    assert held.take() == {}
    flat = torch.tensor([1.0, 2.0, 3.0])
    future = torch.futures.Future()
    future.set_result([flat])
    held.send(future)
    taken = held.take()
    assert {name: part.tolist() for name, part in taken.items()} == {"a": [1.0, 2.0], "b": [3.0]}
    flat.zero_()
    assert taken["a"].tolist() == [1.0, 2.0], "a copy: the buffer is sent again"
    assert held.take() == {}
    with pytest.raises(RuntimeError, match="no sum of this bucket is in flight"):
        held.wait()


def test_the_own_part_is_kept_apart_and_is_that_of_the_newest_sum():
    held, sent = bucket(), torch.tensor([1.0, 2.0, 3.0])
    held.keep_own(sent)
    sent += 1
    assert held.own.tolist() == [1.0, 2.0, 3.0]
    place = held.own.data_ptr()
    held.keep_own(sent)
    assert held.own.tolist() == [2.0, 3.0, 4.0]
    assert held.own.data_ptr() == place, "no memory is asked for in each step"


def test_a_sum_that_was_shared_is_known_until_the_next_one():
    held = bucket()
    held.send(done([1.0, 2.0, 3.0]))
    assert not held.known
    assert held.share().tolist() == [1.0, 2.0, 3.0]
    assert held.known
    assert held.wait().tolist() == [1.0, 2.0, 3.0], "it is still in flight for the step that takes it"
    held.take()
    assert not held.known
    held.send(done([4.0, 5.0, 6.0]))
    held.share()
    held.keep_own(torch.zeros(3))
    assert not held.known
