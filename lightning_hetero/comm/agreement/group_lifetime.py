"""Lifetime of the process groups of a training: until another one begins in the same process.

A group has threads and sockets of its own, and torch keeps it until the default group goes. A training that has ended,
or whose strategy or accelerator is gone, needs its groups no more. They are not left at its end: a collective may be
in flight on them when a training fails, which leaving would wait for; and a checkpoint may be saved behind the end, or
the training go on. When the next training begins, all ranks are past that.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Owner", "ended", "go_on", "leave", "leave_ended", "on_end", "run"]

Closer = Callable[[], Any]


class Owner(Protocol):
    """Owner of process groups, which can leave them and make them again."""

    def open(self) -> None:
        """Make the groups if they were left; a collective call."""

    def close(self) -> None:
        """Leave the groups."""


_ended: list[Owner] = []
_orphans: list[list[Closer]] = []


def on_end(owner: Owner) -> list[Closer]:
    """Return a list for what has to be called once the owner is gone, when the next training begins."""
    closers: list[Closer] = []
    weakref.finalize(owner, _orphan, closers).atexit = False
    return closers


def _orphan(closers: list[Closer]) -> None:
    if closers:
        _orphans.append(closers)


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


def run(closers: list[Closer]) -> None:
    """Call each of them, in order, and forget it."""
    while closers:
        closers.pop(0)()


def leave(group: Any) -> None:
    """Leave a process group, if it did not go with the default one before."""
    if dist.is_initialized():
        with suppress(ValueError):  # of another default group, which was destroyed meanwhile
            if "nccl" in dist.get_backend_config(group):  # whose collectives would be aborted
                torch.cuda.synchronize()
            dist.destroy_process_group(group)
