"""Cluster at a moment of a simulation: its devices, their link, and what slows them down."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.simulate.cluster.link_profile import LinkProfile
from lightning_hetero.simulate.cluster.truth.optimum import CostCurves, CostLines, Costs
from lightning_hetero.simulate.devices.device_profile import Device, DeviceProfile

__all__ = ["ClusterState"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClusterState:
    """Devices and link of a simulated cluster.

    Args:
        devices: profile of each worker, or what has its times.
        names: hardware identity of each worker.
        link: of all of them.
        min_local: fewest samples of each worker.
        capacities: peak FLOP/s of each worker, empty if they are not known.
        slow: factor on all times of each worker, beside the slowdown of its profile.

    Example:
        >>> state = ClusterState((DeviceProfile(0.001, 0.01, 0.002, 0.0, memory=40),), ("a",), LinkProfile())
        >>> state.coefficients.ravel().tolist(), state.workers.max_local
        ([0.001, 0.01, 0.002, 0.0], (40,))
    """

    devices: tuple[Device, ...]
    names: tuple[str, ...]
    link: LinkProfile
    min_local: int = 1
    capacities: tuple[float, ...] = ()
    slow: Array | None = None
    coefficients: Array | None = field(init=False)
    workers: Workers = field(init=False)
    _times: list[Callable[[int], tuple[float, float]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        coefficients = None
        if all(isinstance(device, DeviceProfile) for device in self.devices):
            rows = [[getattr(device, name) for device in self.devices] for name in ("q", "s", "k", "m")]
            coefficients = np.array(rows) * (1.0 if self.slow is None else self.slow)
        object.__setattr__(self, "coefficients", coefficients)
        times = [] if coefficients is not None else [lru_cache(maxsize=None)(device.times) for device in self.devices]
        object.__setattr__(self, "_times", times)  # asked for again and again in the search for the optimum
        most_of_each = (getattr(device, "memory", None) for device in self.devices)
        bounds = tuple(NO_LIMIT if most is None else most for most in most_of_each)
        most = None if min(bounds) == NO_LIMIT else bounds
        object.__setattr__(self, "workers", Workers(self.names, self.capacities, self.min_local, most))

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.devices)

    @property
    def low(self) -> Array:
        """Fewest samples of each worker."""
        return np.full(self.size, float(self.min_local))

    @property
    def high(self) -> Array:
        """Most samples of each worker."""
        return np.array(self.workers.max_local or (NO_LIMIT,) * self.size, dtype=float)

    def times(self, sizes: Array) -> Array:
        """Return ``a`` and ``P`` of the workers at their sizes, shape ``(2, workers)``."""
        if self.coefficients is not None:
            q, s, k, m = self.coefficients
            return np.stack([q * sizes + s, k * sizes + m])
        found = np.array([of(int(size)) for of, size in zip(self._times, sizes, strict=True)], dtype=float).T
        return found * (1.0 if self.slow is None else self.slow)

    def costs(self, slow: Array, shares: Array, seconds: Array) -> Costs:
        """Return the step time that each worker asks for, with factors on their times.

        Args:
            slow: factors.
            shares: share of the backward pass after which each bucket is ready.
            seconds: of each bucket's all-reduce.
        """
        if self.coefficients is not None:
            return CostLines.of(self.coefficients * slow, shares, seconds)
        return CostCurves(lambda sizes: self.times(sizes) * slow, shares, seconds)

    def slowed(self, factors: float | Sequence[float] | Array, link: float = 1.0) -> "ClusterState":
        """Return the cluster with each worker, and the link, slower by a factor than its profile says."""
        slow = np.asarray(factors, dtype=float)
        if slow.shape not in ((), (self.size,)) or not (np.isfinite(slow).all() and (slow > 0).all()):
            raise ValueError(
                f"factors={factors!r} must be finite numbers above 0, one for each of {self.size} workers or one for "
                "all."
            )
        return replace(self, slow=np.broadcast_to(slow, (self.size,)), link=self.link.slowed(link))
