"""Topology of gradient exchange: flat over all ranks, or dense inside clusters and between their leaders (hierarchy).

A low-bandwidth link between clusters then carries only what the leaders exchange, once per cluster. Each of the three
parts (up to the leader, across, down to the members) has a process group of its own and handles the buckets in order:
collectives meet in the same order on all ranks, and one bucket crosses while the next is being reduced. NCCL needs one
order over all groups, because collectives of two groups that start in different orders on two ranks can deadlock. There
the thread that hands the buckets over starts everything, and waits for none of it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.backends import backend_of, new_group
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.group_lifetime import leave, on_end, run
from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives.async_ops import make_future
from lightning_hetero.comm.collectives.cluster_discovery import discover_clusters
from lightning_hetero.core.link.clusters import Clusters

__all__ = ["Topology"]

log = logging.getLogger("lightning_hetero")


_Work: TypeAlias = queue.SimpleQueue[Callable[[], None] | None]


@dataclass(frozen=True)
class _Groups:
    """Process groups of this rank, ``None`` where it takes part in none.

    Args:
        up: group of its cluster, for sums that go to the leader.
        down: group of its cluster, for results that come back from the leader.
        across: group of the leaders, or of all ranks; ``None`` for the default group.
        work: queue of transfers between leaders, which a thread runs in order; ``None`` without clusters.
    """

    up: Any = None
    down: Any = None
    across: Any = None
    work: _Work | None = None


class Topology:
    """All-reduce and all-gather over ranks, flat or by clusters.

    Args:
        rank: this rank.
        clusters: ranks of each cluster, ordered by leader (the lowest rank of a cluster). With one rank in each, or all
            ranks in one, all exchanges are flat.
        timeout: longest wait for another rank.
        apart: whether to make a process group of its own even if all exchanges are flat.

    Example:
        >>> Topology(0, ((0,), (1,))).flat
        True
    """

    def __init__(self, rank: int, clusters: Clusters, *, timeout: timedelta | None = None, apart: bool = False) -> None:
        self.rank, self.given, self.world_size = rank, clusters, sum(map(len, clusters))
        self.flat = len(clusters) in (1, self.world_size)
        self.clusters = tuple((r,) for r in range(self.world_size)) if self.flat else clusters
        self.cluster = next(i for i, members in enumerate(self.clusters) if rank in members)
        self.leader = self.clusters[self.cluster][0]
        self.timeout = timeout
        self._order = list(range(self.size))
        self._stream: Any = None
        self._apart = apart
        self._groups: _Groups | None = None
        self._closers = on_end(self)
        self.open()

    def open(self) -> None:
        """Make the process groups, also again after :meth:`close`; a collective call."""
        if self._groups is None:
            self._groups = self._flat_groups() if self.flat else self._cluster_groups()

    def _flat_groups(self) -> _Groups:
        return _Groups(across=self._join(None) if self._apart else None)

    def _cluster_groups(self) -> _Groups:
        """Make the groups of all clusters in the same order on all ranks, and start the thread; collective."""
        own: tuple[Any, Any] = (None, None)
        for members in self.clusters:
            if len(members) > 1:
                pair = self._join(members), self._join(members)
                own = pair if self.rank in members else own
        across = self._join([members[0] for members in self.clusters])
        work: _Work = queue.SimpleQueue()
        # a daemon, so that a process that fails can end while an exchange waits for it
        threading.Thread(target=_carry_on, args=(work,), name="lightning_hetero-across", daemon=True).start()
        self._closers.append(partial(work.put, None))
        return _Groups(*own, across if self.is_leader else None, work)

    def _join(self, ranks: Sequence[int] | None) -> Any:
        group = new_group(None if ranks is None else list(ranks), timeout=self.timeout)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._closers.append(partial(leave, group))
        return group

    @property
    def _joined(self) -> _Groups:
        return self._groups or _Groups()

    def close(self) -> None:
        """Leave the process groups; the thread ends after the transfers that are still queued."""
        self._groups = None
        run(self._closers)

    @classmethod
    def flat_over(cls, rank: int, world_size: int) -> "Topology":
        """Return the flat topology, in which every rank is a cluster of its own."""
        return cls(rank, tuple((other,) for other in range(world_size)))

    @classmethod
    def form(cls, setting: Any, control: ControlPlane, timeout: timedelta | None) -> "Topology":
        """Make the topology that a checked setting ``hierarchy`` asks for; a collective call.

        Raises:
            ValueError: on every rank, if given clusters omit a rank, or a rank's environment names no cluster.
        """
        clusters = discover_clusters(setting, control)
        topology = cls(control.rank, clusters, timeout=timeout)
        if setting is not None and control.rank == 0 and not topology.flat:
            shown = [list(members) for members in clusters]
            log.info("gradients are summed inside clusters, leaders exchange sums: clusters of ranks %s", shown)
        return topology

    def with_own_groups(self) -> "Topology":
        """Return a topology of the same clusters with separate groups: its exchanges do not wait for those of this one.

        A collective call.
        """
        return Topology(self.rank, self.clusters, timeout=self.timeout, apart=True)

    @property
    def size(self) -> int:
        """Number of participants of an exchange: clusters, or ranks in a flat topology."""
        return len(self.clusters)

    @property
    def is_leader(self) -> bool:
        """True if this rank is the leader of its cluster."""
        return self.rank == self.leader

    def members_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's cluster."""
        return next(members for members in self.clusters if rank in members)

    def all_reduce(self, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        """Begin an all-reduce of a buffer over all ranks, in place."""
        groups = self._joined
        if groups.work is None:
            return sums.async_all_reduce(buffer, groups.across)
        raised = self.reduce_in_cluster(buffer)
        return self._begin(buffer, raised, lambda: sums.async_all_reduce(buffer, groups.across))

    def reduce_in_cluster(self, buffer: torch.Tensor) -> Any:
        """Begin to reduce a buffer inside the cluster, in place on its leader; return the work handle to wait for.

        On other ranks the buffer's content is undefined afterwards. Returns ``None`` for a cluster of one rank.
        """
        up = self._joined.up
        return None if up is None else dist.reduce(buffer, dst=self.leader, group=up, async_op=True)

    def all_gather(self, rows: torch.Tensor, arrived: Callable[[int], None] | None = None) -> Any:
        """Begin to fill ``rows`` on all ranks; row ``i`` is that of cluster ``i``, filled already on its leader.

        The result has ``wait()``, and ``then(callback)`` for callers that do not wait.

        Args:
            rows: uint8, one row for each cluster.
            arrived: called with the number of each row that has arrived; on members, once all rows have.
        """
        if self._joined.work is None:
            return self._gather_across(rows, arrived)
        done = self._begin(rows, None, lambda: self._gather_across(rows, arrived))
        if arrived is not None and not self.is_leader:
            done.then(lambda _: [arrived(row) for row in range(len(rows))])
        return done

    def _gather_across(self, rows: torch.Tensor, arrived: Callable[[int], None] | None) -> Any:
        leaders = [members[0] for members in self.clusters]
        return sums.async_all_gather(rows, self.cluster, leaders, self._joined.across, arrived, self._order)

    def _begin(self, buffer: torch.Tensor, raised: Any, cross: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Pass a buffer to the thread that carries buffers across in order; on a GPU on a stream of its own.

        With NCCL nothing waits on the host, and no thread is needed.
        """
        groups = self._joined
        assert groups.work is not None
        done: torch.futures.Future[Any] = make_future(buffer)
        if buffer.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        filled = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None

        def carry() -> None:
            with torch.cuda.stream(self._stream) if buffer.is_cuda else nullcontext():
                if filled is not None:
                    torch.cuda.current_stream().wait_event(filled)
                self._carry(buffer, raised, done, cross)

        if backend_of(buffer.device, groups.across or groups.down) == "nccl":
            carry()
        else:
            groups.work.put(carry)
        return done

    def _carry(self, buffer: torch.Tensor, raised: Any, done: Any, cross: Callable[[], Any]) -> None:
        """Wait for the reduction inside the cluster, exchange across clusters, and broadcast the result inside."""

        def arrived(future: Any) -> None:
            try:
                future.value()
                done.set_result(buffer)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
                done.set_exception(error)

        try:
            if raised is not None:
                raised.wait()
            if self.is_leader:
                cross().wait()
            down = self._joined.down
            if down is None:
                done.set_result(buffer)
            else:
                work = dist.broadcast(buffer, src=self.leader, group=down, async_op=True)
                work.get_future().then(arrived)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            done.set_exception(error)


def _carry_on(work: _Work) -> None:
    """Carry one buffer across after the other, until the queue gives ``None``."""
    while (carry := work.get()) is not None:
        carry()
        del carry  # it holds a process group
