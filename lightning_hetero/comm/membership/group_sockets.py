"""Sockets of the process groups, so that a worker can leave them although a call in them waits for one that is lost.

Gloo has no way to end a call in flight: freeing a group waits for it, and two workers that leave wait for each other.
When its sockets are shut down, the call fails on both sides.
"""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

__all__ = ["connect", "keep_groups", "making_group", "shut_down_groups"]

_made: set[str] = set()
"""Sockets, by the names that the kernel gives them and never gives again."""

DESCRIPTORS = "/proc/self/fd"

CONNECT_S = 2.0
"""Timeout of a group while it is made; gloo waits five times as long for a connection."""


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by the kernel's names; empty on other systems than Linux."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in os.listdir(DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                name = os.readlink(f"{DESCRIPTORS}/{entry}")
                if name.startswith("socket:"):
                    found[name] = int(entry)
    return found


@contextmanager
def making_group() -> Iterator[None]:
    """Note the sockets that come up inside as those of a process group."""
    before = _sockets()
    try:
        yield
    finally:
        _made.update(_sockets().keys() - before.keys())


def connect(make: Callable[..., Any], timeout: timedelta | None) -> Any:
    """Make a process group; raise an error soon if a member is lost when it has given its address.

    Nothing ends gloo's wait for the connection of such a member but the group's timeout.

    Args:
        make: makes the group with the ``timeout`` that it is given.
        timeout: of the calls in the group, ``None`` for torch's own.

    Returns:
        The group; ``None`` for the default one.
    """
    timeout = timeout or dist.default_pg_timeout
    lasts = dist.get_debug_level() == dist.DebugLevel.DETAIL  # the timeout of its wrapper cannot be set afterwards
    with making_group():
        group = make(timeout=timeout if lasts else min(timeout, timedelta(seconds=CONNECT_S)))
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not lasts:
        _set_pg_timeout(timeout, group)
    return group


def shut_down_groups() -> int:
    """Shut down all connections of process groups; return their number."""
    count = 0
    for name, descriptor in _sockets().items():
        if name in _made:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                one.getpeername()  # fails for a listening one, which gloo's thread needs
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    _made.clear()
    return count


def keep_groups() -> None:
    """Keep all process groups that there are for the rest of the process, also when they are destroyed.

    To be called when a call in one of them may never end, because a connection ended in the middle of its message: who
    frees the group waits for that call.
    """
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # not in a list: it is emptied when the interpreter ends
