"""Discovery of ranks that share a fast link: by given names, or by timing messages."""

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.core.link.clusters import Clusters, check_clusters, clusters_by_name, clusters_by_time

__all__ = ["PING", "VARIABLE", "PingSettings", "discover_clusters", "link_seconds"]


VARIABLE = "LIGHTNING_HETERO_CLUSTER"


@dataclass(frozen=True)
class PingSettings:
    """Timed transfers between two ranks.

    Args:
        num_bytes: bytes of one transfer.
        repeats: measurements per pair; the shortest counts.
    """

    num_bytes: int = 262_144
    repeats: int = 3


PING = PingSettings()


def discover_clusters(setting: Any, control: ControlPlane) -> Clusters:
    """Return the clusters that a checked setting ``hierarchy`` asks for; a collective call.

    Raises:
        ValueError: on every rank, if given clusters omit a rank, or a rank's environment names no cluster.
    """
    ranks = range(control.world_size)
    if setting is None or control.world_size == 1:
        return tuple((rank,) for rank in ranks)
    if setting == "nodes":
        return clusters_by_name(control.gather_objects(socket.gethostname()))
    if setting == "env":
        names = control.gather_objects(os.environ.get(VARIABLE))
        missing = [rank for rank in ranks if not names[rank]]
        if missing:
            raise ValueError(
                f"hierarchy='env' reads the cluster of each process from {VARIABLE}, which is not set on rank "
                f"{', '.join(map(str, missing))}. Set it to a name that the processes of one cluster share."
            )
        return clusters_by_name(names)
    if setting == "auto":
        return clusters_by_time(link_seconds(control))
    return check_clusters(setting, control.world_size)


def link_seconds(control: ControlPlane, num_bytes: int | None = None) -> npt.NDArray[np.float64]:
    """Measure the seconds of a small round trip between each two ranks, shape ``(N, N)``; a collective call.

    Ranks meet in pairs, as in a round-robin tournament, and send bytes back and forth; the best of three counts.

    Args:
        control: the ranks.
        num_bytes: bytes of one transfer; 256 KiB by default.
    """
    n = control.world_size
    mine = np.zeros(n)
    seats: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    probe = torch.zeros(num_bytes or PING.num_bytes, dtype=torch.uint8)
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        for one, other in zip(seats[:half], reversed(seats[half:]), strict=True):
            if one is not None and other is not None and control.rank in (one, other):
                mine[one + other - control.rank] = _ping(probe, min(one, other), max(one, other), control)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    everyone = control.gather(mine)
    seconds: npt.NDArray[np.float64] = np.maximum(everyone, everyone.T)
    return seconds


def _ping(probe: torch.Tensor, low: int, high: int, control: ControlPlane) -> float:
    """Return the shortest seconds of a round trip between two ranks."""
    best = float("inf")
    for _ in range(PING.repeats):
        begin = time.perf_counter()
        if control.rank == low:
            control.send(probe, high)
            control.receive(probe, high)
        else:
            control.receive(probe, low)
            control.send(probe, low)
        best = min(best, time.perf_counter() - begin)
    return best
