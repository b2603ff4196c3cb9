"""Clocks that mark moments without stopping the device: host time on CPU, CUDA events read later on GPU."""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Marks moments in the order of the device's work; marks of two clocks or ranks are never compared."""

    def mark(self) -> Any:
        """This moment."""

    def ready(self, mark: Any) -> bool:
        """Whether the device has reached the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks that are ready."""

    def wait(self) -> None:
        """Until the device has reached all marks so far; for a checkpoint, which waits for the device anyway."""

    def wait_for(self, mark: Any) -> None:
        """Until the device has reached the mark."""


class HostClock:
    """Monotonic host time, for devices that compute in step with the host."""

    def mark(self) -> float:
        """This moment."""
        return time.perf_counter()

    def ready(self, mark: float) -> bool:
        """Host time is always there."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start

    def wait(self) -> None:
        """Nothing to wait for."""

    def wait_for(self, mark: float) -> None:
        """Nothing to wait for."""


class CudaClock:
    """CUDA events on the current stream: cheap to record, and read later without waiting."""

    def mark(self) -> torch.cuda.Event:
        """An event behind all work that is queued on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Whether the stream has passed the event."""
        return bool(mark.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two events that are ready."""
        return float(start.elapsed_time(end)) * 1e-3

    def wait(self) -> None:
        """Until the device has done all that was asked of it, on every stream."""
        torch.cuda.synchronize()

    def wait_for(self, mark: torch.cuda.Event) -> None:
        """Until the stream has passed the event."""
        mark.synchronize()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device.

    Example:
        >>> type(clock_for(torch.device("cpu"))).__name__
        'HostClock'
    """
    return CudaClock() if device.type == "cuda" else HostClock()
