"""Profile of a link: how long the gradients of a step take, bucket by bucket (C sec. 3.2), and how its rate moves."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_int, check_number

__all__ = ["LinkProfile"]

Array = npt.NDArray[np.float64]


@checked_keywords
@dataclass(frozen=True)
class LinkProfile:
    """Time that the all-reduce of a step's gradients takes on a ring of workers.

    The gradients leave in buckets of equal size, in order: a bucket is averaged once all workers have it and the one
    before is done. The first is ready after the share ``gamma`` of the backward pass, the last at its end, the others
    evenly in between; a single bucket is ready at the end.

    Args:
        gradient_bytes: bytes of all gradients of a worker, ``>= 0``.
        rate: bytes per second that each worker sends, above 0; infinite for no limit.
        latency: seconds of each bucket's all-reduce beside its bytes, ``>= 0``.
        buckets: number of buckets, ``>= 1``.
        gamma: share of the backward pass before the first bucket is ready, 0 to 1.
        contention: share of a stale message's time by which computing gets longer that it covers, 0 to below 1.
        jitter: relative standard deviation of a factor on the seconds of a step's all-reduces, ``>= 0``.
        trace: ``(seconds, rate)`` pairs: from that second of the virtual clock on, the link has that rate. Before the
            first pair, it is ``rate``.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range; it is named.

    Example:
        >>> link = LinkProfile(gradient_bytes=100e6, rate=1.25e9, latency=1e-4, buckets=4)
        >>> link.seconds(2).round(4).tolist()
        [0.0201, 0.0201, 0.0201, 0.0201]
        >>> link.ready_shares.tolist()
        [0.12, 0.41333333333333333, 0.7066666666666667, 1.0]
    """

    gradient_bytes: float = 0.0
    rate: float = inf
    latency: float = 0.0
    buckets: int = 5
    gamma: float = 0.12
    jitter: float = 0.0
    contention: float = 0.0
    trace: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        for name, high in (("gradient_bytes", inf), ("latency", inf), ("gamma", 1.0), ("jitter", inf)):
            object.__setattr__(self, name, check_number(name, getattr(self, name), low=0.0, high=high))
        check_number("contention", self.contention, low=0.0, high=0.99)
        object.__setattr__(self, "rate", _checked_rate("rate", self.rate))
        check_int("buckets", self.buckets, minimum=1)
        object.__setattr__(self, "trace", _checked_trace(self.trace))

    @property
    def ready_shares(self) -> Array:
        """Share of the backward pass after which each bucket is ready."""
        if self.buckets == 1:
            return np.ones(1)
        return np.asarray(self.gamma + (1.0 - self.gamma) * np.arange(self.buckets) / (self.buckets - 1))

    def bytes_of_bucket(self, workers: int) -> float:
        """Return the bytes that each worker sends for one bucket, ``2 (n - 1) / n`` of its size on a ring."""
        return 2.0 * (workers - 1) / workers * self.gradient_bytes / self.buckets

    def seconds(self, workers: int, at: float = 0.0) -> Array:
        """Return the seconds of each bucket's all-reduce at the rate that the link has at a second of the clock.

        One worker sends nothing, which takes no time. A rate that changes on the way is left out here; a simulation
        counts it (:meth:`transfer`).
        """
        if workers == 1:
            return np.zeros(self.buckets)
        return np.full(self.buckets, self.latency + self.bytes_of_bucket(workers) / self.rate_at(at))

    def rate_at(self, second: float) -> float:
        """Return the bytes per second at a second of the clock.

        Example:
            >>> LinkProfile(rate=1e9, trace=[(10.0, 1e6), (20.0, 1e9)]).rate_at(10.0)
            1000000.0
        """
        last = bisect_right([at for at, _ in self.trace], second) - 1
        return self.rate if last < 0 else self.trace[last][1]

    def transfer(self, num_bytes: float, start: float) -> float:
        """Return the seconds that bytes take which leave at a second of the clock, whatever the rate becomes meanwhile.

        Example:
            >>> LinkProfile(rate=2.0, trace=[(1.0, 1.0)]).transfer(3.0, start=0.0)
            2.0
        """
        now, left = start, num_bytes
        for at, _ in self.trace:
            if at > now:
                sent = (at - now) * self.rate_at(now)
                if sent >= left:
                    break
                now, left = at, left - sent
        return now - start + left / self.rate_at(now)

    def slowed(self, factor: float) -> "LinkProfile":
        """Return the link with all of its times longer by a factor.

        Example:
            >>> LinkProfile(gradient_bytes=1e6, rate=1e6, latency=0.5).slowed(2.0).latency
            1.0
        """
        check_number("factor", factor, low=0.0, include_low=False)
        trace = tuple((at, rate / factor) for at, rate in self.trace)
        return replace(self, rate=self.rate / factor, latency=self.latency * factor, trace=trace)


def _checked_rate(name: str, rate: object) -> float:
    if isinstance(rate, float) and rate == inf:
        return inf
    try:
        return check_number(name, rate, low=0.0, include_low=False)
    except ValueError as error:
        raise ValueError(f"{error} float('inf') is a link without a limit; 100 Mbit/s are 12.5e6.") from None


def _checked_trace(trace: object) -> tuple[tuple[float, float], ...]:
    """Return the pairs of second and rate, in the order of seconds."""
    try:
        pairs = tuple((at, rate) for at, rate in trace)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(
            f"trace={trace!r} must be pairs of seconds and bytes per second, such as [(0.0, 12.5e6), (60.0, 62.5e6)]."
        ) from None
    found = tuple(
        (check_number(f"second {i} of trace", at, low=0.0), _checked_rate(f"rate {i} of trace", rate))
        for i, (at, rate) in enumerate(pairs)
    )
    if any(later <= before for (before, _), (later, _) in zip(found[:-1], found[1:], strict=True)):
        raise ValueError(f"trace={trace!r} must have its seconds in increasing order, each once; sort it.")
    return found
