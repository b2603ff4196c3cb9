"""Speed of a device by products of matrices over some seconds, and whether it becomes slower on the way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

__all__ = ["Speed", "measure_speed", "slowdown", "timed_windows"]

WINDOWS = 15
"""Parts into which the seconds are divided."""
LEAST_SECONDS = 1.0
"""Shortest measurement that can tell a slowdown from noise; CPU quotas are renewed every 0.1 s."""
LEAST_SLOWDOWN = 0.1
"""Relative loss of speed below which a device counts as steady."""
LARGEST = {"cpu": 2048, "cuda": 4096}
"""Most rows of a matrix."""


@dataclass(frozen=True)
class Speed:
    """Speed of a device.

    Args:
        flops: floating-point operations per second at the end.
        rates: those of each part of the measurement.
        slowdown: relative loss from the beginning to the end, 0 within the noise, ``None`` if too short to say.
        clock: clock of a GPU at the end in MHz, ``None`` if the driver was not asked.
        power: power of a GPU at the end in watts, likewise.
    """

    flops: float
    rates: tuple[float, ...]
    slowdown: float | None
    clock: float | None = None
    power: float | None = None


def measure_speed(device: torch.device, seconds: float, precision: str) -> Speed:
    """Multiply square matrices for some seconds.

    Args:
        device: where.
        seconds: how long, above 0.
        precision: name of a floating-point type of torch.
    """
    work, run = _product(device, getattr(torch, precision), seconds)
    rates = [work * rate for rate in timed_windows(run, seconds)]
    end = len(rates) - max(1, len(rates) // 3)
    clock, power = _driver(device)
    lost = slowdown(rates) if seconds >= LEAST_SECONDS else None
    return Speed(median(rates[end:]), tuple(rates), lost, clock, power)


def timed_windows(
    run: Callable[[], None], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the runs per second of each part of a measurement, three parts at least, after one run to warm up.

    Args:
        run: does something and waits for its end.
        seconds: how long to measure.
        clock: seconds.
    """
    run()
    width = seconds / WINDOWS
    rates: list[float] = []
    begin = last = clock()
    while last - begin < seconds or len(rates) < 3:
        count, now = 0, last
        while now - last < width:
            run()
            count, now = count + 1, clock()
        rates.append(count / (now - last))
        last = now
    return rates


def slowdown(rates: Sequence[float]) -> float:
    """Return the relative loss from the first third to the last, 0 if it is small or their rates overlap.

    Example:
        >>> slowdown([10, 10, 9, 8, 7, 7, 7, 7, 7]), slowdown([10, 5, 10, 8, 7, 7, 9, 6, 9])
        (0.3, 0.0)
    """
    third = len(rates) // 3
    if not third:
        return 0.0
    first, last = sorted(rates[:third]), sorted(rates[-third:])
    lost = 1.0 - median(last) / median(first)
    return round(lost, 4) if lost > LEAST_SLOWDOWN and last[-1] < first[0] else 0.0


def _product(device: torch.device, dtype: torch.dtype, seconds: float) -> tuple[float, Callable[[], None]]:
    """Return products of matrices that are large enough for the device's full speed, and their operations."""
    rows, least = 256, min(0.02, seconds / 50)
    while True:
        run = _multiplier(rows, 1, device, dtype)
        run()
        begin = time.perf_counter()
        run()
        took = time.perf_counter() - begin
        if took >= least or rows >= LARGEST[device.type]:
            break
        rows *= 2
    repeats = max(1, round(least / max(took, 1e-9)))
    return 2.0 * rows**3 * repeats, _multiplier(rows, repeats, device, dtype)


def _multiplier(rows: int, repeats: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    left, right = (torch.rand(rows, rows, device=device).to(dtype) for _ in range(2))
    product = torch.empty(rows, rows, device=device, dtype=dtype)

    def run() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _driver(device: torch.device) -> tuple[float | None, float | None]:
    """Return clock in MHz and power in watts as the driver gives them, ``None`` where it cannot be asked."""
    if device.type != "cuda":
        return None, None
    try:
        return float(torch.cuda.clock_rate(device)), torch.cuda.power_draw(device) / 1e3
    except Exception:  # noqa: BLE001 - needs the package of the driver's library, whose errors are its own
        return None, None
