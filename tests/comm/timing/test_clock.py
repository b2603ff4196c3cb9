"""Clocks: host time as it is; CUDA events that are recorded now and read later."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.timing import clock as module
from lightning_hetero.comm.timing.clock import CudaClock, HostClock, agreed_clock, clock_for
from tests.helpers import run_ranks


class Event:
    """Stands for ``torch.cuda.Event``: knows its moment in milliseconds and whether the device has passed it."""

    recorded = 0

    def __init__(self, enable_timing=False):
        assert enable_timing, "an event without timing cannot be read"
        self.moment, self.passed = None, False

    def record(self, stream=None):
        assert stream == "the stream of cuda:1", "another thread's current device may be another GPU"
        Event.recorded += 1
        self.moment = Event.recorded * 250.0

    def query(self):
        return self.passed

    def elapsed_time(self, end):
        assert self.passed, "reading an event that was not passed is an error in CUDA"
        assert end.passed
        return end.moment - self.moment

    def synchronize(self):
        raise AssertionError("a clock must never wait")


def test_host_clock_is_monotonic_and_always_ready(monkeypatch):
    times = iter([1.5, 4.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    clock = HostClock()
    start, end = clock.mark(), clock.mark()
    monkeypatch.undo()
    assert clock.ready(start)
    assert clock.ready(end)
    assert clock.seconds(start, end) == 2.5


def test_cuda_clock_records_and_reads_later(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock = CudaClock(torch.device("cuda", 1))
    start, end = clock.mark(), clock.mark()
    assert clock.ready(start) is False
    start.passed = end.passed = True
    assert clock.ready(end) is True
    assert clock.seconds(start, end) == 0.25


def test_cuda_clock_waits_for_the_device_if_asked_to(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    clock = CudaClock(torch.device("cuda", 1))
    clock.wait()
    clock.wait_for(SimpleNamespace(synchronize=lambda: waited.append("mark")))
    assert waited == [torch.device("cuda", 1), "mark"]


def test_clock_of_a_device():
    assert clock_for(torch.device("cuda", 3)).device == torch.device("cuda", 3)
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


@pytest.mark.parametrize("kind", ["xpu", "hpu", "mps"])
def test_a_device_without_a_clock_is_refused(kind):
    """The host's clock would not know when such a device has done anything."""
    with pytest.raises(ValueError, match=f"{kind}.*'cpu' and 'cuda'"):
        clock_for(torch.device(kind))


def _agreed(rank, kinds, backend="gloo"):
    dist.init_process_group(backend)
    clock = agreed_clock(torch.device(kinds[rank]), ControlPlane(rank, len(kinds)))
    dist.destroy_process_group()
    return type(clock).__name__


def test_a_device_without_a_clock_is_refused_on_every_rank():
    assert run_ranks(_agreed, 2, ("cpu", "cuda:0")) == ["HostClock", "CudaClock"]
    errors = run_ranks(_agreed, 2, ("cpu", "xpu"), expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    assert all(message.startswith("rank 1 computes on 'xpu'; workers") for *_, message in errors)


def test_a_device_whose_tensors_the_group_does_not_carry_is_refused_on_every_rank():
    errors = run_ranks(_agreed, 2, ("cpu", "cuda:0"), "cpu:gloo", expect_errors=True)
    assert [(rank, kind) for rank, kind, _ in errors] == [(0, "ValueError"), (1, "ValueError")]
    assert all("process_group_backend" in message for *_, message in errors)


def test_a_worker_alone_may_compute_anywhere_and_is_told_by_which_clock(caplog):
    with caplog.at_level("INFO", logger="lightning_hetero"):
        assert isinstance(agreed_clock(torch.device("mps"), ControlPlane(0, 1)), HostClock)
    assert "times of steps on 'mps' are those of the host" in caplog.text


def _on_the_device(rank):
    """Spans of 1 and of 200 products, and of both, marked by a thread for which the current device is the first one."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    clock, x = CudaClock(device), torch.randn(2048, 2048, device=device)
    with ThreadPoolExecutor(1) as thread:
        marks = [thread.submit(clock.mark).result()]
        for repeats in (1, 200):
            for _ in range(repeats):
                x @ x
            marks.append(thread.submit(clock.mark).result())
    clock.wait()
    assert all(clock.ready(mark) for mark in marks)
    return [clock.seconds(marks[i], marks[j]) for i, j in ((0, 1), (1, 2), (0, 2))]


@pytest.mark.gpu
def test_cuda_clock_on_the_device():
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    ((first, second, both),) = run_ranks(_on_the_device, 1, start="spawn")
    assert both > 0
    assert both == pytest.approx(first + second, rel=1e-3)
