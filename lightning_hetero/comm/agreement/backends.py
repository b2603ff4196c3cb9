"""Backends of devices, whether those of all ranks fit together, and subgroups that any backend can make."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend, BackendConfig
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_hetero.comm.membership.group_sockets import connect
from lightning_hetero.comm.membership.slots import SLOT

__all__ = ["backend_of", "check_backends", "compare_backends", "new_group"]

PATIENCE = timedelta(seconds=10)
"""Longest wait, when ranks are refused, until all of them know why: then rank 0 may end the store."""
_TRAININGS = count()
"""Numbers of the comparisons of this process, which are those of its peers: torchrun starts all anew together."""


def backend_of(device: torch.device, group: Any = None) -> str:
    """Return the backend that carries tensors of a device: ``"nccl"`` for a GPU under ``"cpu:gloo,cuda:nccl"``.

    Args:
        device: where the tensors are.
        group: process group, ``None`` for the default one.

    Returns:
        The name in lower case, empty where the group carries no tensors of this device.
    """
    return _carrier(dist.get_backend_config(group), device.type)


def _carrier(backend: str, kind: str) -> str:
    return str(BackendConfig(Backend(backend)).get_device_backend_map().get(kind, ""))


def check_backends(given: Sequence[tuple[str, str]]) -> None:
    """Refuse ranks that exchange gradients by different backends, or by one that does not carry their tensors.

    Args:
        given: name of the backend and kind of the device, of each rank.

    Raises:
        ValueError: in these cases, naming the ranks.

    Example:
        >>> check_backends([("gloo", "cuda"), ("gloo", "cpu")])
        >>> check_backends([("nccl", "cuda"), ("gloo", "cpu")])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ranks cannot exchange gradients: rank 0 sends those of a 'cuda' device by 'nccl', ...
    """
    if len(given) == 1:
        return
    carriers = [(backend.lower(), _carrier(backend, kind)) for backend, kind in given]
    if len(set(carriers)) == 1 and carriers[0][1]:
        return
    ranks: dict[str, list[str]] = {}
    for rank, (backend, kind) in enumerate(given):
        ranks.setdefault(f"those of a {kind!r} device by {backend!r}", []).append(str(rank))
    named = ", ".join(f"rank {' and '.join(numbers)} sends {way}" for way, numbers in ranks.items())
    raise ValueError(
        f"ranks cannot exchange gradients: {named}. Give one backend that carries all of them on every rank: "
        "process_group_backend='gloo' in the strategy, InitProcessGroupKwargs(backend='gloo') in Accelerate, "
        "init_process_group('gloo') in your own loop."
    )


def compare_backends(
    backend: str, device: torch.device, *, rank: int, world_size: int, timeout: timedelta | None
) -> dist.Store | None:
    """Let the ranks tell each other their backends in the store of ``env://``, before they make the default group.

    Without this, a rank with NCCL and one with gloo wait for each other until the timeout. Each training of a process
    has keys of its own, so that no rank reads what another said before; those of the training before go.

    Args:
        backend: with which this rank would make the group.
        device: of this rank.
        rank: this rank.
        world_size: number of ranks.
        timeout: longest wait for another rank; that of torch by default.

    Returns:
        The store, to be kept until the group exists, since rank 0 serves it; ``None`` without other ranks.

    Raises:
        ValueError: on every rank, if :func:`check_backends` refuses them.
    """
    if world_size == 1:
        return None
    timeout = timeout or default_pg_timeout
    server: dist.Store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
    training = next(_TRAININGS)
    everyone = [f"lightning_hetero/backend/{training}/{each}" for each in range(world_size)]
    server.set(everyone[rank], f"{backend} {device.type}")
    if training:
        server.delete_key(f"lightning_hetero/backend/{training - 1}/{rank}")
    server.wait(everyone, timeout)
    given = [value.decode().split(" ") for value in server.multi_get(everyone)]
    try:
        check_backends([(name, kind) for name, kind in given])
    except ValueError:
        with suppress(RuntimeError):  # the store may be gone with rank 0
            server.set(f"{everyone[rank]} read", "")
            server.wait([f"{key} read" for key in everyone], PATIENCE)
        raise
    return server


def new_group(ranks: list[int] | None = None, *, timeout: timedelta | None = None, **kwargs: Any) -> Any:
    """Make a process group as :func:`torch.distributed.new_group` does, also where a default group is bound to a GPU.

    A frontend binds the default group to its GPU, whatever the backend. Torch then splits each subgroup off the default
    group and, on ranks outside it, calls a function that only NCCL has: gloo fails with "no attribute
    'perform_nocolor_split'".
    """
    make = partial(dist.new_group, ranks, **kwargs)
    with _unbound_without_split():
        return connect(make, timeout) if SLOT in os.environ else make(timeout=timeout)  # a worker may be lost meanwhile


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
