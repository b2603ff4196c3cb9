"""Times of buckets and transfers, with a clock that is set by hand."""

import numpy as np
import pytest

from lightning_hetero.comm.timing.bucket_timer import BucketTimer, busy_seconds, combine


class Hand:
    """A clock whose time is set; marks beyond ``reached`` are not ready yet, as on a device that lags behind."""

    def __init__(self):
        self.now, self.reached = 0.0, float("inf")

    def mark(self):
        return self.now

    def ready(self, mark):
        return mark <= self.reached

    def seconds(self, start, end):
        return end - start


def step(log, clock, begin, events):
    """``(ready, sent, arrived, released)`` of each bucket of a step, in seconds after ``begin``."""
    calls = []
    for index, (ready, sent, arrived, released) in enumerate(events):
        clock.now = begin + ready
        release = log.ready(index)
        clock.now = begin + sent
        arrive = log.send()
        calls += [(begin + arrived, arrive), (begin + released, release)]
    for moment, call in sorted(calls, key=lambda pair: pair[0]):
        clock.now = moment
        call()


FIRST = [(1.0, 1.0, 1.5, 1.5), (2.0, 2.0, 3.0, 3.0)]


def rows(log, buckets=2):
    table = log.take(buckets)
    return table[np.isfinite(table[:, 0])].tolist()


def test_rows_by_hand():
    """The second step begins at 3, after the first; nobody waits for its second sum, which comes late."""
    clock = Hand()
    log = BucketTimer(clock)
    step(log, clock, 0.0, FIRST)
    step(log, clock, 3.0, [(1.0, 1.0, 1.5, 1.5), (2.0, 2.0, 4.0, 2.0)])
    assert rows(log) == [[2.0, 2.5, 1.0, 2.0]]
    assert rows(log) == [], "a row was reported twice"
    step(log, clock, 5.0, [(1.0, 1.0, 2.25, 2.25), (2.0, 2.0, 3.0, 2.5)])
    assert rows(log) == [[3.0, 1.0, 1.0, 2.0]], "seconds in which the link carried the step before are counted again"


def test_a_step_waits_for_its_last_mark_and_other_layouts_are_left_out():
    clock = Hand()
    log = BucketTimer(clock)
    step(log, clock, 0.0, FIRST)
    step(log, clock, 3.0, FIRST)
    clock.reached = 5.5
    assert rows(log) == []
    clock.reached = float("inf")
    assert rows(log, buckets=3) == []
    assert [row[0] for row in rows(log)] == [2.0]


def table(*rows, buckets=2):
    out = np.full((32, 2 + buckets), np.nan)
    out[: len(rows)] = rows
    return out


def test_ranks_are_matched_by_step_the_last_one_counts():
    fast = table([4, 3.0, 0.5, 1.0], [5, 2.0, 0.5, 1.0], [6, 9.0, 9.0, 9.0])
    slow = table([3, 7.0, 7.0, 7.0], [4, 1.0, 2.0, 3.0], [5, 2.5, 2.0, 2.5])
    busy, ready = combine(np.stack([fast, slow]))
    assert busy == np.median([1.0, 2.0])
    assert ready.tolist() == [2.0, np.median([3.0, 2.5])]
    assert combine(np.stack([table([1, 1, 1, 1]), table([2, 1, 1, 1])])) is None


@pytest.mark.parametrize(
    ("spans", "busy"), [([], 0.0), ([(0, 1), (2, 3)], 2.0), ([(0, 5), (1, 2)], 5.0), ([(2, 4), (1, 3)], 3.0)], ids=str
)
def test_busy_seconds(spans, busy):
    assert busy_seconds(spans) == busy
