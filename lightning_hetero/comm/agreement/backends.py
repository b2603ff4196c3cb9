"""Backends of devices, and subgroups that any backend can make."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend, BackendConfig

from lightning_hetero.comm.membership.group_sockets import connect, making_group
from lightning_hetero.comm.membership.slots import SLOT

__all__ = ["backend_of", "new_group"]


def backend_of(device: torch.device, group: Any = None) -> str:
    """Return the backend that carries tensors of a device: ``"nccl"`` for a GPU under ``"cpu:gloo,cuda:nccl"``.

    Args:
        device: where the tensors are.
        group: process group, ``None`` for the default one.

    Returns:
        The name in lower case, empty where the group carries no tensors of this device.
    """
    config: str = dist.get_backend_config(group)
    return str(BackendConfig(Backend(config)).get_device_backend_map().get(device.type, ""))


def new_group(ranks: list[int] | None = None, *, timeout: timedelta | None = None, **kwargs: Any) -> Any:
    """Make a process group as :func:`torch.distributed.new_group` does, also where a default group is bound to a GPU.

    A frontend binds the default group to its GPU, whatever the backend. Torch then splits each subgroup off the default
    group and, on ranks outside it, calls a function that only NCCL has: gloo fails with "no attribute
    'perform_nocolor_split'".
    """
    with _unbound_without_split():
        if SLOT in os.environ:  # a worker may be lost meanwhile
            return connect(partial(dist.new_group, ranks, **kwargs), timeout)
        with making_group():
            return dist.new_group(ranks, timeout=timeout, **kwargs)


@contextmanager
def _unbound_without_split() -> Iterator[None]:
    """Unbind the default group from its device inside the context, unless its backend supports splitting."""
    default: Any = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if bound is None or backend_of(bound) == "nccl":
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
