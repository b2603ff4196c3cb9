"""Clocks: host time as it is; CUDA events that are recorded now and read later."""

import pytest
import torch

from lightning_hetero.comm import clock as module
from lightning_hetero.comm.clock import CudaClock, HostClock, clock_for


class Event:
    """Stands for ``torch.cuda.Event``: knows its moment in milliseconds and whether the device has passed it."""

    recorded = 0

    def __init__(self, enable_timing=False):
        assert enable_timing, "an event without timing cannot be read"
        self.moment, self.passed = None, False

    def record(self):
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
    clock = CudaClock()
    start, end = clock.mark(), clock.mark()
    assert clock.ready(start) is False
    start.passed = end.passed = True
    assert clock.ready(end) is True
    assert clock.seconds(start, end) == 0.25


def test_cuda_clock_waits_for_the_device_if_asked_to(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    CudaClock().wait()
    assert waited == [True]


def test_clock_of_a_device():
    assert isinstance(clock_for(torch.device("cuda", 3)), CudaClock)
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("mps")), HostClock)


@pytest.mark.gpu
def test_cuda_clock_on_the_device():
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    clock, x = CudaClock(), torch.randn(2048, 2048, device="cuda")
    marks = [clock.mark()]
    for repeats in (1, 200):
        for _ in range(repeats):
            x @ x
        marks.append(clock.mark())
    torch.cuda.synchronize()
    assert all(clock.ready(mark) for mark in marks)
    assert clock.seconds(marks[0], marks[2]) > 0
    assert clock.seconds(marks[0], marks[2]) == pytest.approx(
        clock.seconds(marks[0], marks[1]) + clock.seconds(marks[1], marks[2]), rel=1e-3
    )
