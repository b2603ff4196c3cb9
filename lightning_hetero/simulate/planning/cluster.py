"""Cluster to plan for: its workers' times (C eq. 3) and what its gradients cross."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isinf

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.keywords import checked_keywords, closest
from lightning_hetero.core.link.bandwidth import sum_bytes
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeModels
from lightning_hetero.core.validation import check_int, check_number
from lightning_hetero.simulate.devices.device_profile import DeviceProfile
from lightning_hetero.simulate.devices.names import UnknownNameError
from lightning_hetero.simulate.planning.units import MOST_NUMBER, parse_count
from lightning_hetero.simulate.planning.wording import check_name, counted

__all__ = ["Cluster", "Link", "Worker"]

Array = npt.NDArray[np.float64]

LEAST_SECONDS = 1e-15
"""Least time of a sample; published ones of the smallest models are 1e-13 seconds."""


@checked_keywords
@dataclass(frozen=True, slots=True)
class Worker:
    """A worker: its time for a batch, what disturbs and bounds it, and what it costs.

    Args:
        name: of the device.
        q: seconds per sample outside of the backward pass.
        s: fixed seconds outside of the backward pass.
        k: seconds per sample in the backward pass.
        m: fixed seconds in the backward pass.
        memory: most samples of a batch, ``None`` for no bound.
        error: relative standard error of its time model, ``>= 0``.
        jitter: relative standard deviation of each of its times, ``>= 0``.
        price: of an hour, ``None`` if unknown.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range.

    Example:
        >>> Worker("gpu", q=0.001, s=0.01, k=0.002, m=0.02).seconds(10)
        0.06
    """

    name: str
    q: float
    s: float
    k: float
    m: float
    memory: int | None = None
    error: float = 0.0
    jitter: float = 0.0
    price: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        for field, most in (*dict.fromkeys("qskm", MOST_NUMBER).items(), ("error", 1e3), ("jitter", 1e3)):
            object.__setattr__(self, field, check_number(field, getattr(self, field), low=0.0, high=most))
        if self.memory is not None:
            check_int("memory", self.memory, minimum=1)
        if self.price is not None:
            check_number("price", self.price, low=0.0, high=MOST_NUMBER)
        if self.q + self.k < LEAST_SECONDS:
            raise ValueError(
                f"q + k of {self.name!r} is {self.q + self.k:g}, so that a batch of any size would take the same time; "
                f"give {LEAST_SECONDS:g} seconds a sample at least."
            )

    @classmethod
    def of(cls, profile: DeviceProfile, price: float | None = None) -> "Worker":
        """Return the worker that a device profile describes."""
        p = profile
        return cls(p.name, p.q, p.s, p.k, p.m, p.memory, jitter=p.jitter, price=price)

    def profile(self) -> DeviceProfile:
        """Return the device profile, for a simulation or an emulation."""
        return DeviceProfile(self.q, self.s, self.k, self.m, self.memory, self.jitter, name=self.name)

    def seconds(self, batch_size: float) -> float:
        """Return ``a + P`` of a batch."""
        return (self.q + self.k) * batch_size + self.s + self.m


@checked_keywords
@dataclass(frozen=True, slots=True)
class Link:
    """Time in which the gradients of a step are averaged: measured, or from their size and the link's rate.

    On a ring of ``n`` workers, each bucket takes ``latency + 2 (n - 1) / n bytes / rate``. The last one is ``t_u``, the
    others together are ``t_o``. Measured times scale with ``2 (n - 1) / n`` to other numbers of workers.

    Args:
        gradient_bytes: bytes of all gradients of a worker, ``None`` if unknown.
        rate: bytes per second that a worker sends, above 0; infinite for no limit.
        latency: seconds of each bucket beside its bytes.
        buckets: number of buckets, ``>= 1``.
        gamma: share of the backward pass before the first bucket is ready, 0 to 1.
        t_o: measured seconds of all buckets but the last, at ``measured_on`` workers.
        t_u: measured seconds of the last bucket.
        measured_on: number of workers of the measured times, 0 if the times follow from the rate.

    Example:
        >>> Link(gradient_bytes=100e6, rate=1.25e9, buckets=4).times(2)
        (0.06, 0.02)
    """

    gradient_bytes: float | None = None
    rate: float = inf
    latency: float = 0.0
    buckets: int = 5
    gamma: float = 0.12
    t_o: float = 0.0
    t_u: float = 0.0
    measured_on: int = 0

    def times(self, workers: int) -> tuple[float, float]:
        """Return ``t_o`` and ``t_u`` with this many workers, in seconds."""
        if workers == 1:
            return 0.0, 0.0
        if self.measured_on:
            factor = 1.0 if self.measured_on == 1 else sum_bytes(1.0, workers) / sum_bytes(1.0, self.measured_on)
            return self.t_o * factor, self.t_u * factor
        each = self.latency
        if not isinf(self.rate):
            each += sum_bytes(self.gradient_bytes or 0.0, workers) / self.buckets / self.rate
        return (self.buckets - 1) * each, each

    def at_rate(self, rate: float) -> "Link":
        """Return the link with another rate; a measured one becomes faster or slower in proportion.

        Raises:
            ValueError: if the size of the gradients is not known.
        """
        now = self.effective_rate()
        if self.measured_on and now is not None and not isinf(now):
            return replace(self, rate=rate, t_o=self.t_o * now / rate, t_u=self.t_u * now / rate)
        if self.gradient_bytes is None and not isinf(rate):
            raise ValueError(
                "the link's time is not known without the size of the gradients. Give the workload, or the model: "
                "--model params=124M."
            )
        return replace(self, rate=rate, t_o=0.0, t_u=0.0, measured_on=0)

    def effective_rate(self) -> float | None:
        """Return the bytes per second, of a measured link those that its times amount to; ``None`` if unknown."""
        if not self.measured_on:
            return self.rate
        seconds = self.t_o + self.t_u
        if seconds <= 0:
            return inf
        if self.gradient_bytes is None or self.measured_on == 1:
            return None
        return sum_bytes(self.gradient_bytes, self.measured_on) / seconds

    def scaled(self, factor: float) -> "Link":
        """Return the link at ``factor`` times its rate; an infinite factor leaves the latency only."""
        if self.measured_on:
            return replace(self, t_o=self.t_o / factor, t_u=self.t_u / factor)
        return replace(self, rate=self.rate * factor)


@checked_keywords
@dataclass(frozen=True)
class Cluster:
    """Workers and their link.

    Args:
        workers: one each.
        link: what their gradients cross.
        total_batch_size: samples of a step, ``None`` if it is not decided.
        samples: samples of an epoch, ``None`` if unknown.
        name: of the cluster.
        workload: published workload that named devices train.
        jitter: relative standard deviation of the times of named devices.

    Raises:
        ValueError: if there is no worker.

    Example:
        >>> two = Cluster((Worker("a", 0.001, 0, 0.002, 0), Worker("b", 0.002, 0, 0.004, 0)))
        >>> two.model().step_time([20, 10]), [worker.name for worker in two.dropped(["a"]).workers]
        (0.06, ['b'])
    """

    workers: tuple[Worker, ...]
    link: Link = Link()
    total_batch_size: int | None = None
    samples: int | None = None
    name: str = ""
    workload: str | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("a cluster needs at least one worker.")
        if self.name:
            check_name(self.name)

    @cached_property
    def coefficients(self) -> Array:
        """``(q, s, k, m)`` of each worker."""
        return np.array([(w.q, w.s, w.k, w.m) for w in self.workers])

    def model(self, workers: int | None = None) -> ClusterTimeModel:
        """Return the time model, with the link's times of another number of workers if it is given."""
        t_o, t_u = self.link.times(len(self.workers) if workers is None else workers)
        return ClusterTimeModel(NodeModels(self.coefficients), self.link.gamma, t_o, t_u)

    def limits(self, total: int) -> npt.NDArray[np.int64]:
        """Return the most samples of each worker: its memory, and no more than the total."""
        return np.array([total if w.memory is None else min(w.memory, total) for w in self.workers])

    def with_link(self, link: Link) -> "Cluster":
        """Return the cluster with another link."""
        return replace(self, link=link)

    def priced(self, prices: Mapping[str, float]) -> "Cluster":
        """Return the cluster with the prices given by device; ``"*"`` is for workers that have none."""
        by_name = {name.lower(): price for name, price in prices.items()}

        def price(worker: Worker) -> float | None:
            return by_name.get(worker.name.lower(), by_name.get("*") if worker.price is None else worker.price)

        return replace(self, workers=tuple(replace(worker, price=price(worker)) for worker in self.workers))

    def added(self, workers: Iterable[Worker]) -> "Cluster":
        """Return the cluster with more workers."""
        return replace(self, workers=(*self.workers, *workers))

    def dropped(self, names: Sequence[str], of: int | None = None) -> "Cluster":
        """Return the cluster without the last worker of each name; ``2xT4`` names two.

        Args:
            names: of the workers to leave out.
            of: number of the first workers, of which some may be left out; all of them by default.

        Raises:
            UnknownNameError: if there is no such worker.
            ValueError: if a count is 0, or none would be left.
        """
        left, kept = list(self.workers[:of]), self.workers[len(self.workers) if of is None else of :]
        for entry in names:
            match = re.fullmatch(r"(\d+)\s*[x*]\s*(.+)", entry.strip())
            count, name = (parse_count(match[1], 100_000), match[2]) if match else (1, entry.strip())
            for _ in range(count):
                at = [i for i, worker in enumerate(left) if worker.name.lower() == name.lower()]
                if not at:
                    there = list(dict.fromkeys(worker.name for worker in self.workers[:of]))
                    number = sum(worker.name.lower() == name.lower() for worker in self.workers[:of])
                    few = f"the cluster has only {counted(number, 'worker')} {name!r} to leave out." if number else ""
                    unknown = f"there is no worker {name!r} to leave out.{closest(name, there)}"
                    raise UnknownNameError(f"{few or unknown} The workers are {', '.join(there[:20])}.")
                left.pop(at[-1])
        if not left and not kept:
            raise ValueError("all workers would be left out; leave one at least.")
        return replace(self, workers=(*left, *kept))
