"""Marks of a step: processor seconds of a backward pass, and the marks that show that a micro-batch is over."""

import numpy as np
import pytest

from lightning_hetero.comm.timing.step_marks import BackwardMarks, BatchMarks


def batch(backwards, updates, start=0.0, ends=(100.0,)):
    return BatchMarks(4, (-2.0, -1.0), start, backwards, updates, [(60.0, 61.0)], list(ends), [5.0], [])


def test_processor_seconds_are_those_up_to_the_last_gradient():
    readings = np.cumsum(np.random.default_rng(0).random(6)).tolist()
    passage = BackwardMarks(0.0, [], {}, [], readings, [], [])
    assert passage.processor_seconds == readings[-1] - readings[0] > 0.0


@pytest.mark.parametrize("readings", [[], [3.0]], ids=["no quota", "no gradient"])
def test_no_processor_seconds(readings):
    assert BackwardMarks(0.0, [], {}, [], readings, [], []).processor_seconds == 0.0


def test_last_marks_are_the_last_ones_of_each_part():
    """Of a backward pass all ends of buckets, which may be marked by other streams in any order, and its last end."""
    first = BackwardMarks(1.0, [2.0, 3.0], {1: 7.0, 0: 6.0}, [4.0, 8.0], [], [], [0, 0])
    second = BackwardMarks(11.0, [12.0], {0: 15.0}, [14.0], [], [], [0])
    marks = batch([first, second], [(20.0, 22.0, []), (30.0, 33.0, [(31.0, 32.0)])]).last_marks
    assert sorted(marks) == [0.0, 6.0, 7.0, 8.0, 14.0, 15.0, 22.0, 33.0, 100.0]


def test_a_batch_that_is_over_twice_ends_with_the_later_mark():
    assert sorted(batch([], [], start=1.0, ends=(2.0, 9.0)).last_marks) == [1.0, 9.0]
