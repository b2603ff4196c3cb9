"""Cluster at a moment of a simulation: its devices, their link, and what slows them down."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.core.batching.plan import NO_LIMIT
from lightning_hetero.simulate.cluster.link_profile import LinkProfile
from lightning_hetero.simulate.cluster.truth.optimum import CostLines
from lightning_hetero.simulate.devices.device_profile import DeviceProfile

__all__ = ["ClusterState"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClusterState:
    """Devices and link of a simulated cluster.

    Args:
        devices: profile of each worker.
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

    devices: tuple[DeviceProfile, ...]
    names: tuple[str, ...]
    link: LinkProfile
    min_local: int = 1
    capacities: tuple[float, ...] = ()
    slow: Array | None = None
    coefficients: Array = field(init=False)
    workers: Workers = field(init=False)

    def __post_init__(self) -> None:
        rows = [[getattr(device, name) for device in self.devices] for name in ("q", "s", "k", "m")]
        factor = 1.0 if self.slow is None else self.slow
        object.__setattr__(self, "coefficients", np.array(rows) * factor)
        bounds = tuple(NO_LIMIT if device.memory is None else device.memory for device in self.devices)
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

    def lines(self, slow: Array, at: float) -> CostLines:
        """Return the step time that each worker asks for, with factors on their times, at a second of the clock."""
        return CostLines.of(self.coefficients * slow, self.link.ready_shares, self.link.seconds(self.size, at))

    def slowed(self, factors: float | Sequence[float] | Array, link: float = 1.0) -> "ClusterState":
        """Return the cluster with each worker, and the link, slower by a factor than its profile says."""
        slow = np.asarray(factors, dtype=float)
        if slow.shape not in ((), (self.size,)) or not (np.isfinite(slow).all() and (slow > 0).all()):
            raise ValueError(
                f"factors={factors!r} must be finite numbers above 0, one for each of {self.size} workers or one for "
                "all."
            )
        return replace(self, slow=np.broadcast_to(slow, (self.size,)), link=self.link.slowed(link))
