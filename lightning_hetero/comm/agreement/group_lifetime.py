"""Lifetime of the process groups of a training, and of its keys in the store: until another begins in the process.

A group has threads and sockets of its own, and torch keeps it until the default group is destroyed. A training that
has ended, or whose strategy or accelerator is gone, no longer needs its groups. They are still not left at its end:
when a training fails, a collective may be in flight, and leaving would wait for it; a checkpoint may be saved after the
end; or the training may go on. When the next training begins, all ranks are past that.
"""

import threading
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
    "leave_ended",
    "leave_ended_later",
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
_orphans: list[tuple[Any, list[Closer]]] = []
"""Callbacks of owners that are gone, with a reference to the default group under which each owner was made."""


def on_end(owner: Owner) -> list[Closer]:
    """Return a list of callbacks, run when the next training begins if the owner is gone by then."""
    closers: list[Closer] = []
    default = dist.group.WORLD
    made_in = None if default is None else weakref.ref(default)
    weakref.finalize(owner, _orphan, made_in, closers).atexit = False
    return closers


def _orphan(made_in: Any, closers: list[Closer]) -> None:
    if closers:
        _orphans.append((made_in, closers))


def leave_soon(group: Any) -> None:
    """Leave a group that was made for nothing when the next control plane begins: all ranks have made it by then.

    At once would be too early: with the group go its keys in the store, which another rank may need to connect.
    """
    _orphans.append((weakref.ref(dist.group.WORLD), [partial(leave, group)]))


def ended(*owners: Owner) -> None:
    """Note that a training has ended: its groups are left when the next one begins, unless it goes on before."""
    _ended.extend(owner for owner in owners if not any(owner is other for other in _ended))


def go_on(*owners: Owner) -> None:
    """Let a training that has ended go on; a collective call."""
    _ended[:] = [other for other in _ended if not any(other is owner for owner in owners)]
    for owner in owners:
        owner.open()


def leave_ended() -> None:
    """Leave the groups of all trainings that have ended.

    Those under a default group that was destroyed are only freed, by a thread: if a worker was lost, a call in one of
    them may never end, and all others would wait for this worker.
    """
    while _ended:
        _ended.pop(0).close()
    default, stale = dist.group.WORLD, list[Closer]()
    while _orphans:
        made_in, closers = _orphans.pop(0)
        if default is not None and made_in is not None and made_in() is default:
            run(closers)
        else:
            stale.append(partial(run, closers))
        del closers
    if stale:
        _run_in_thread(stale)


def leave_ended_later() -> None:
    """Leave the groups of all trainings that have ended from a thread of its own, without waiting for it.

    To be called after the default group was destroyed, because a worker is lost: freeing a group waits for its calls,
    and one that is stuck would keep this worker from the next training, in which all others wait for it.
    """
    left: list[Closer] = [*(owner.close for owner in _ended), *(partial(run, closers) for _, closers in _orphans)]
    _ended.clear()
    _orphans.clear()
    _run_in_thread(left)


def _run_in_thread(left: list[Closer]) -> None:
    threading.Thread(target=run, args=(left,), name="lightning_hetero-leave", daemon=True).start()


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
