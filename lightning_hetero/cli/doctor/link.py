"""Link between the ranks: latency and rate of each pair, and all-reduces of several sizes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.cluster_discovery import PING, link_seconds
from lightning_hetero.comm.link.link_benchmark import BENCHMARK, all_reduce_seconds
from lightning_hetero.core.link.bandwidth import sum_bytes

__all__ = ["LinkFacts", "measure_pairs", "measure_sums"]

Array = npt.NDArray[np.float64]

SIZES = (4_096, 65_536, 1_048_576, 16_777_216, 67_108_864)
"""Bytes of the all-reduces."""
LONGEST_S = 0.25
"""Seconds of an all-reduce after which no larger one is tried."""
PAIR_S = 0.02
"""Seconds that the message should take from whose time a pair's rate follows."""
MOST_PAIR_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class LinkFacts:
    """Measured link.

    Args:
        backend: that averages gradients.
        latency: seconds of a small message between each two ranks, one way.
        rate: bytes per second between each two ranks.
        sums: bytes and seconds of all-reduces, in order.
        clusters: ranks that a much faster link joins.
    """

    backend: str
    latency: tuple[tuple[float, ...], ...] = ()
    rate: tuple[tuple[float, ...], ...] = ()
    sums: tuple[tuple[int, float], ...] = ()
    clusters: tuple[tuple[int, ...], ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.latency)

    def bus_rate(self, size: int, seconds: float) -> float:
        """Return the bytes per second that each rank sends during an all-reduce."""
        return sum_bytes(float(size), self.world_size) / seconds

    @property
    def averaging_rate(self) -> float | None:
        """Bytes of gradients per second that the largest all-reduce averages."""
        return self.sums[-1][0] / self.sums[-1][1] if self.sums else None


def measure_pairs(control: ControlPlane) -> tuple[Array, Array, Array]:
    """Return the latency and rate of each pair of ranks, and the seconds that tell clusters; a collective call."""
    latency = link_seconds(control, BENCHMARK.latency_bytes) / 2.0
    usual = link_seconds(control) / 2.0
    size, seconds = PING.num_bytes, usual
    larger = int(min(size * PAIR_S / max(float(usual.max()), 1e-9), MOST_PAIR_BYTES))
    if larger > 2 * size:
        size, seconds = larger, link_seconds(control, larger) / 2.0
    beside = ~np.eye(len(latency), dtype=bool)
    rate = np.zeros_like(seconds)
    rate[beside] = size / np.maximum(seconds - latency, 0.1 * seconds)[beside]
    return latency, rate, usual


def measure_sums(control: ControlPlane, device: torch.device, group: Any = None) -> list[tuple[int, float]]:
    """Return bytes and seconds of all-reduces, of the slowest rank; a collective call.

    Larger ones are left out where they would take long.
    """
    found = []
    for size in SIZES:
        seconds = float(control.gather(np.array([all_reduce_seconds(size, device, group)])).max())
        found.append((size, seconds))
        if seconds > LONGEST_S:
            break
    return found
