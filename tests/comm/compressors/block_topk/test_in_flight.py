"""Buckets that wait for a message, in the order of DDP, and what became of them."""

import pytest
import torch

from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight
from lightning_hetero.compression.layout import Layout

SLOTS = [[slot] for slot in Layout.of([("a", 3), ("b", 2), ("c", 4)], block=2).slots]


class Reduction:
    """A sum inside a cluster, which is done when it is told."""

    def __init__(self, completed=False):
        self.completed, self.waited = completed, 0

    def is_completed(self):
        return self.completed

    def wait(self):
        self.waited += 1


def filled(*reductions):
    running = BackwardPass()
    buffers = [torch.full((2,), float(i)) for i in range(len(reductions))]
    futures = [torch.futures.Future() for _ in reductions]
    for buffer, slots, future, reduced in zip(buffers, SLOTS, futures, reductions, strict=False):
        running.add(buffer, slots, future, reduced)
    return running, buffers, futures


def test_buckets_without_a_cluster_come_in_their_order():
    running, buffers, _ = filled(None, None, None)
    popped = [running.pop_reduced(everything=False) for _ in range(4)]
    assert popped[3] is None
    for (buffer, slots), expected, own in zip(popped[:3], buffers, SLOTS, strict=True):
        assert buffer is expected
        assert slots is own


def test_a_bucket_waits_for_its_own_reduction_and_for_those_before():
    first, second = Reduction(), Reduction(completed=True)
    running, buffers, _ = filled(first, second)
    assert running.pop_reduced(everything=False) is None, "the second one is done, and is not the next"
    assert (first.waited, second.waited) == (0, 0)
    first.completed = True
    assert running.pop_reduced(everything=False)[0] is buffers[0]
    assert running.pop_reduced(everything=False)[0] is buffers[1]
    assert (first.waited, second.waited) == (1, 1), "an error of a reduction shows when it is waited for"


def test_everything_is_waited_for_at_the_end():
    first, second = Reduction(), Reduction()
    running, buffers, _ = filled(first, second)
    for reduction, buffer in ((first, buffers[0]), (second, buffers[1])):
        assert running.pop_reduced(everything=True)[0] is buffer
        assert reduction.waited == 1
    assert running.pop_reduced(everything=True) is None


@pytest.mark.parametrize("arrived", ["dense", "compressed"])
def test_ddp_gets_its_own_buffers_once(arrived):
    running, buffers, futures = filled(None, None)
    assert not any(future.done() for future in futures)
    running.complete(arrived)
    for future, buffer in zip(futures, buffers, strict=True):
        assert future.value() is buffer
    running.complete(arrived)  # a future that is set twice is an error of torch's
    assert running.take_arrived() == arrived
    assert running.take_arrived() is None


def test_one_bucket_that_is_not_finite_is_not_made_good_by_the_next():
    running = BackwardPass()
    for finite in (True, False, True):
        running.accumulated(finite, (0.0, 1.0))
    assert not running.finite
    running = BackwardPass()
    for i in range(3):
        running.accumulated(True, (float(i), i + 0.5))
    assert running.finite
    assert running.spans == [(0.0, 0.5), (1.0, 1.5), (2.0, 2.5)]


def test_passes_share_nothing():
    running, _, _ = filled(None)
    running.accumulated(False, (0.0, 1.0))
    running.hand_over({})
    other = BackwardPass()
    assert (other.waiting, other.raised, other.spans, other.finite) == ([], [], [], True)
    assert other.gradients is other.arrived is None
    assert (other.weight, other.scale) == (1.0, 1.0)
    running.hand_over(None)
    assert running.gradients is None


def test_messages_in_flight_may_turn_out_to_be_not_finite():
    sent = InFlight(torch.zeros((2, 8), dtype=torch.uint8), 3, None, finite=True)
    sent.mark_not_finite()
    assert not sent.finite
