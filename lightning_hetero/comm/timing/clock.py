"""Clocks that mark moments without stopping the device: host time on CPU, CUDA events read later on GPU."""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.backends import check_backends
from lightning_hetero.comm.agreement.control_plane import ControlPlane

__all__ = ["Clock", "CudaClock", "HostClock", "Mark", "agreed_clock", "clock_for"]

log = logging.getLogger("lightning_hetero")


Mark = Any
"""A moment: seconds of the host, or an event of the device."""


class Clock(Protocol):
    """Clock whose marks are in the order of the device's work; marks of two clocks or ranks are never compared.

    Attributes:
        synchronous: whether a mark is reached as soon as it is made.
    """

    synchronous: bool

    def mark(self) -> Mark:
        """Mark this moment."""

    def ready(self, mark: Mark) -> bool:
        """Return whether the device has reached the mark."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks that are ready."""

    def wait(self) -> None:
        """Wait until the device has reached all marks so far; for a checkpoint, which waits for the device anyway."""

    def wait_for(self, mark: Mark) -> None:
        """Wait until the device has reached the mark."""


class HostClock:
    """Monotonic host time, for devices that compute in step with the host.

    Attributes:
        mark: returns this moment; directly ``time.perf_counter``, because a step makes many marks.
    """

    synchronous = True

    def __init__(self) -> None:
        self.mark: Callable[[], float] = time.perf_counter

    def ready(self, mark: float) -> bool:
        """Return ``True``: a host time is known at once."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - start

    def wait(self) -> None:
        """Wait for nothing."""

    def wait_for(self, mark: float) -> None:
        """Wait for nothing."""


class CudaClock:
    """CUDA events on the current stream of a device: cheap to record, and read later without waiting.

    Args:
        device: this rank's device. The process group's threads, which mark the ends of buckets, may have another
            current device.
    """

    synchronous = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event behind all work that is queued on the current stream of the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        """Return whether the stream has passed the event."""
        return bool(mark.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events that are ready."""
        return float(start.elapsed_time(end)) * 1e-3

    def wait(self) -> None:
        """Wait until the device has finished its queued work on every stream."""
        torch.cuda.synchronize(self.device)

    def wait_for(self, mark: torch.cuda.Event) -> None:
        """Wait until the stream has passed the event."""
        mark.synchronize()


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device.

    Raises:
        ValueError: if it is neither a CPU nor a CUDA device.

    Example:
        >>> type(clock_for(torch.device("cpu"))).__name__
        'HostClock'
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(_unknown(f"a worker computes on {device.type!r}"))
    return CudaClock(device) if device.type == "cuda" else HostClock()


def _unknown(given: str) -> str:
    return (
        f"{given}; workers of unequal batches compute on 'cpu' and 'cuda' devices, the only ones whose work is timed "
        "and whose gradients are exchanged in the right order. Choose accelerator='cpu' or 'gpu', or train with "
        "strategy='ddp' (Accelerate: Accelerator)."
    )


def agreed_clock(device: torch.device, control: ControlPlane) -> Clock:
    """Return the clock of this rank's device, if every rank's device has one and a backend; a collective call.

    A single worker shares no batches, so it may compute on any device; without a clock of its own, host time counts.

    Raises:
        ValueError: on every rank, if there are several and one computes on a device that has no clock, or whose
            tensors the backends of the ranks do not carry to each other.
    """
    group = dist.get_backend_config() if control.world_size > 1 else ""
    given = control.gather_objects((group, device.type))
    kinds = [kind for _, kind in given]
    without = [f"rank {rank} computes on {kind!r}" for rank, kind in enumerate(kinds) if kind not in ("cpu", "cuda")]
    if without and len(kinds) > 1:
        raise ValueError(_unknown(", ".join(without)))
    if without:
        log.info("times of steps on %r are those of the host, which may be ahead of the device.", device.type)
        return HostClock()
    check_backends(given)
    return clock_for(device)
