"""Rows that are waited for in turn: each is seen to arrive when it does, whoever is slow; sums that order streams."""

import random

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives.async_ops import SharedNotes
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
    sums.GatherHandle(works, lambda row: marks.setdefault(row, clock["now"]), order).wait()
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


class Done:
    """A row's work that is over, well or not."""

    def __init__(self, error=None):
        self.error, self.future = error, torch.futures.Future()
        self.future.set_result(None) if error is None else self.future.set_exception(error)

    def get_future(self):
        return self.future

    def wait(self):
        pass


def test_who_does_not_wait_is_called_back_for_each_row():
    rows, called = [], []
    arrival = sums.GatherHandle([Done(), Done()], rows.append, [0, 1])
    for _ in range(2):
        arrival.then(lambda done: called.append(done.done()))
    arrival.wait()
    assert rows == [0, 1]
    assert called == [True, True]


def test_who_does_not_wait_is_told_of_a_row_that_does_not_come():
    rows = []
    arrival = sums.GatherHandle([Done(), Done(RuntimeError("connection closed by peer"))], rows.append, [0, 1])
    with pytest.raises(RuntimeError, match="closed by peer"):
        arrival.then(lambda done: done.value()).wait()
    with pytest.raises(RuntimeError, match="closed by peer"):
        arrival.wait()
    assert rows == [0]


def test_a_gathering_in_one_call_that_fails_says_so_and_tells_of_no_row(monkeypatch):
    rows, failed = [], Done(RuntimeError("connection closed by peer"))
    monkeypatch.setattr(sums, "backend_of", lambda device, group: "nccl")
    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(sums.dist, name, lambda *given, **kwargs: failed, raising=False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        sums.async_all_gather(torch.zeros(2, 5, dtype=torch.uint8), 0, [0, 1], None, rows.append).wait()
    assert rows == []


def test_what_a_future_holds_is_handed_on_be_it_an_error():
    for done in (Done(), Done(RuntimeError("connection closed by peer"))):
        to = torch.futures.Future()
        sums.forward_result(to, done.future)
        if done.error is None:
            assert to.wait() is None
        else:
            with pytest.raises(RuntimeError, match="closed by peer"):
                to.wait()


def test_a_future_for_a_tensor_on_a_gpu_orders_its_streams(monkeypatch):
    monkeypatch.setattr(torch.futures, "Future", lambda devices=None: devices)
    assert sums.make_future(OnGPU()) == [torch.device("cuda", 1)]
    assert sums.make_future(torch.zeros(1)) is None


def _complex(rank):
    dist.init_process_group("gloo")
    buffer = torch.tensor([1.0 + 2.0j * rank])
    sums.async_all_reduce(buffer).wait()
    return buffer.item()


def test_complex_gradients_are_summed():
    assert run_ranks(_complex, 2) == [2.0 + 2.0j] * 2


def _gathered(rank):
    dist.init_process_group("gloo")
    sums.backend_of = lambda device, group=None: "nccl"  # the way of NCCL, which gloo can go as well
    rows = torch.zeros(3, 5, dtype=torch.uint8)
    rows[rank] = rank + 1
    seen = []
    sums.async_all_gather(rows, rank, range(3), None, seen.append).wait()
    return rows[:, 0].tolist(), sorted(seen)


def test_one_call_gathers_all_rows_where_the_backend_does_that_in_place():
    assert run_ranks(_gathered, 3) == [([1, 2, 3], [0, 1, 2])] * 3


def test_the_backend_of_the_rows_decides_how_they_travel(monkeypatch):
    """Under "cpu:gloo,cuda:nccl" the group's name is not NCCL's, yet rows on a GPU are gathered in one call."""
    asked = []
    monkeypatch.setattr(sums, "backend_of", lambda device, group: asked.append((device, group)) or "gloo")
    monkeypatch.setattr(sums.dist, "broadcast", lambda *args, **kwargs: None)
    sums.async_all_gather(torch.zeros(1, 5, dtype=torch.uint8, device="meta"), 0, [0], "a group")
    assert asked == [(torch.device("meta"), "a group")]


class OnGPU:
    """What a sum asks of its buffer."""

    is_cuda, device = True, torch.device("cuda", 1)

    @staticmethod
    def is_complex():
        return False


class Landing:
    """Work of gloo with a tensor on a GPU: its future says that the copy back was begun, and orders no stream."""

    def __init__(self):
        self.future, self.ordered = torch.futures.Future(), []

    def get_future(self):
        return self.future

    def synchronize(self):
        self.ordered.append(self.future.done())


@pytest.fixture
def landing(monkeypatch):
    work = Landing()
    monkeypatch.setattr(sums.dist, "all_reduce", lambda buffer, group, async_op: work)
    monkeypatch.setattr(sums, "make_future", lambda buffer: torch.futures.Future())
    return work


def test_a_sum_by_gloo_on_a_gpu_orders_the_stream_of_who_waits(landing, monkeypatch):
    monkeypatch.setattr(sums, "backend_of", lambda device, group: "gloo")
    buffer = OnGPU()
    future = sums.async_all_reduce(buffer)
    assert not future.done()
    assert landing.ordered == []
    landing.future.set_result([buffer])
    assert landing.ordered == [True]
    assert future.value() is buffer


def test_a_sum_by_gloo_on_a_gpu_that_fails_says_so(landing, monkeypatch):
    monkeypatch.setattr(sums, "backend_of", lambda device, group: "gloo")
    future = sums.async_all_reduce(OnGPU())
    landing.future.set_exception(RuntimeError("connection closed by peer"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        future.wait()
    assert landing.ordered == []


def test_a_sum_by_nccl_orders_streams_itself(landing, monkeypatch):
    monkeypatch.setattr(sums, "backend_of", lambda device, group: "nccl")
    assert sums.async_all_reduce(OnGPU()) is landing.future


def test_who_waits_after_being_called_back_is_ordered_behind_each_row():
    class Done:
        waited = 0

        def get_future(self):
            future = torch.futures.Future()
            future.set_result(None)
            return future

        def wait(self):
            self.waited += 1

    works = [Done(), Done()]
    arrival = sums.GatherHandle(works, None, [0, 1])
    arrival.then(lambda done: None)
    arrival.wait()
    assert [work.waited for work in works] == [1, 1]


# notes


def _read(rank):
    """What is read in each step, if ranks note something at steps of their own."""
    torch.distributed.init_process_group("gloo")
    notes, seen = SharedNotes(ControlPlane(rank, 2), 2), []
    for step in range(6):
        seen.append(notes.take())
        notes.send([15 if (rank, step) == (1, 2) else 0, 10 if (rank, step) == (0, 3) else 0])
    return seen, notes.take(), notes.take()


def test_all_ranks_read_a_note_in_the_step_after_it_was_sent():
    nothing = [0, 0]
    for seen, last, none in run_ranks(_read, 2):
        assert seen == [nothing, nothing, nothing, [15, 0], [0, 10], nothing]
        assert last == none == nothing


def test_a_rank_alone_reads_its_own_notes():
    rng = random.Random(0)
    notes = SharedNotes(ControlPlane(0, 1), 3)
    assert notes.take() == [0, 0, 0]
    for _ in range(5):
        sent = [rng.randrange(9) for _ in range(3)]
        notes.send(sent)
        assert notes.take() == sent
