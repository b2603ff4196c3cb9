"""Rows that are waited for in turn: each is seen to arrive when it does, whoever is slow, and what fails is raised."""

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm import sums
from tests.helpers import run_ranks


class Clocked:
    """A row's work that is over at a moment of a clock that waiting moves on."""

    def __init__(self, clock, moment):
        self.clock, self.moment = clock, moment

    def wait(self):
        if self.moment is None:
            raise RuntimeError("connection closed by peer")
        self.clock["now"] = max(self.clock["now"], self.moment)


def seen(order, moments, monkeypatch):
    """When each row is seen to arrive."""
    clock, marks = {"now": 0.0}, {}
    monkeypatch.setattr(sums.time, "perf_counter", lambda: clock["now"])
    works = [Clocked(clock, moment) for moment in moments]
    sums.Arrival(works, lambda row: marks.setdefault(row, clock["now"]), order).wait()
    return [marks[row] for row in range(len(moments))]


def test_a_slow_row_hides_the_others_once_and_not_again(monkeypatch):
    order = [0, 1, 2, 3]
    moments = [9.0, 1.0, 2.0, 1.0]
    assert seen(order, moments, monkeypatch) == [9.0, 9.0, 9.0, 9.0]
    for _ in range(3):
        last = seen(order, moments, monkeypatch)
    assert last == moments
    for _ in range(4):
        last = seen(order, moments[::-1], monkeypatch)
    assert last == moments[::-1]


def test_a_row_that_does_not_come_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="closed by peer"):
        seen([0, 1], [1.0, None], monkeypatch)


def test_who_does_not_wait_is_called_back_for_each_row():
    class Done:
        def get_future(self):
            future = torch.futures.Future()
            future.set_result(None)
            return future

    rows, called = [], []
    arrival = sums.Arrival([Done(), Done()], rows.append, [0, 1])
    arrival.then(lambda done: called.append(done.done()))
    arrival.wait()
    assert rows == [0, 1]
    assert called == [True]


def _gathered(rank):
    dist.init_process_group("gloo")
    sums.dist.get_backend = lambda group=None: "nccl"  # the way of NCCL, which gloo can go as well
    rows = torch.zeros(3, 5, dtype=torch.uint8)
    rows[rank] = rank + 1
    seen = []
    sums.gather_over_ranks(rows, rank, range(3), None, seen.append).wait()
    return rows[:, 0].tolist(), sorted(seen)


def test_one_call_gathers_all_rows_where_the_backend_does_that_in_place():
    assert run_ranks(_gathered, 3) == [([1, 2, 3], [0, 1, 2])] * 3
