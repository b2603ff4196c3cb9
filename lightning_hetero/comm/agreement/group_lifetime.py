"""Lifetime of the process groups of a training, and of its keys in the store: until another begins in the process.

A group has threads and sockets of its own, and torch keeps it until the default group is destroyed. A training that
has ended, or whose strategy or accelerator is gone, no longer needs its groups. They are still not left at its end:
when a training fails, a collective may be in flight, and leaving would wait for it; a checkpoint may be saved after the
end; or the training may go on. When the next training begins, all ranks are past that.
"""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.comm.failures.store_keys import forget_keys

__all__ = [
    "Owner",
    "ended",
    "free_group_last",
    "go_on",
    "leave",
    "leave_all",
    "leave_ended",
    "leave_soon",
    "on_end",
    "run",
]

Closer = Callable[[], Any]


class Owner(Protocol):
    """Owner of process groups, able to leave them and to make them again."""

    def open(self) -> None:
        """Make the groups if they were left; a collective call."""

    def close(self) -> None:
        """Leave the groups."""


_ended: list[Owner] = []
_orphans: list[list[Closer]] = []
"""Callbacks of owners that are gone."""

LOOK_S = 0.5
"""Time between two looks at who holds a group."""


def on_end(owner: Owner) -> list[Closer]:
    """Return a list of callbacks, run when the next training begins if the owner is gone by then."""
    closers: list[Closer] = []
    weakref.finalize(owner, _orphan, closers).atexit = False
    return closers


def _orphan(closers: list[Closer]) -> None:
    if closers:
        _orphans.append(closers)


def leave_soon(group: Any) -> None:
    """Leave a group that was made for nothing when the next control plane begins: all ranks have made it by then.

    At once would be too early: with the group go its keys in the store, which another rank may need to connect.
    """
    _orphans.append([partial(leave, group)])


def ended(*owners: Owner) -> None:
    """Note that a training has ended: its groups are left when the next one begins, unless it goes on before."""
    _ended.extend(owner for owner in owners if not any(owner is other for other in _ended))


def go_on(*owners: Owner) -> None:
    """Let a training that has ended go on; a collective call."""
    _ended[:] = [other for other in _ended if not any(other is owner for owner in owners)]
    for owner in owners:
        owner.open()


def leave_ended() -> None:
    """Leave the groups of all trainings that have ended."""
    while _ended:
        _ended.pop(0).close()
    while _orphans:
        run(_orphans.pop(0))


def leave_all() -> None:
    """Leave all groups there are, without waiting for a call in one of them, which may never end.

    Who frees the last reference to a group waits for its calls. If a worker was lost, one of them may be stuck, and all
    others would wait for this worker, whenever it frees the group. So a thread holds each group longer than others do.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    gc.collect()  # what a training has left holds them, too
    leave_ended()
    threading.Thread(target=_free_last, args=(groups,), name="lightning_hetero-leave", daemon=True).start()


def _free_last(groups: list[Any]) -> None:
    """Free each group when nobody else holds it."""
    alone = 3  # references: of the list, of the loop, and of the call that counts them
    while groups:
        time.sleep(LOOK_S)
        groups[:] = [group for group in groups if sys.getrefcount(group) > alone]


def run(closers: list[Closer]) -> None:
    """Call the closers in order, and empty the list."""
    while closers:
        closers.pop(0)()


def leave(group: Any) -> None:
    """Leave a process group, unless it was destroyed together with the default group."""
    if dist.is_initialized():
        with suppress(ValueError, TypeError):  # the group went with a default group; torch's error for that varies
            if "nccl" in dist.get_backend_config(group):  # destroying it would abort running collectives
                torch.cuda.synchronize()
            first = dist.get_rank(group) == 0
            dist.destroy_process_group(group)
            if first:
                forget_keys(dist.distributed_c10d._get_default_store(), f"{group.group_name}/")


def free_group_last(model: DistributedDataParallel) -> None:
    """Keep the process group of a DDP model until its reducer is gone, also if the default group is destroyed before.

    A reducer that frees the last reference to a group holds the interpreter's lock while it waits for gloo's threads.
    One of them may still hold the last sum, and need the lock to free it: the process would never end. A reference of
    Python's gives the lock away.
    """
    for part in (model.reducer, model.logger):  # the logger has the reducer, too; both call back when they are gone
        weakref.finalize(part, _forget, model.process_group).atexit = False


def _forget(group: Any) -> None:
    """Free the reference to a group."""
