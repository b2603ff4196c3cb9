"""Preparations of a front end for joining the process group: backends are compared, stale addresses warned of."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_hetero.comm.agreement.backends import compare_backends
from lightning_hetero.frontend.log import log

__all__ = ["joining", "warn_of_stale_addresses"]


@contextmanager
def joining(strategy: Any) -> Iterator[None]:
    """Let a Lightning or Fabric strategy join the process group inside the context, if all ranks have one backend.

    Args:
        strategy: strategy that knows its rank.

    Raises:
        ValueError: on every rank, if their backends differ.
    """
    if dist.is_initialized():
        yield
        return
    warn_of_stale_addresses(os.environ)
    environment = strategy.cluster_environment
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    store = compare_backends(
        strategy._get_process_group_backend(),
        strategy.root_device,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=strategy._timeout,
    )
    yield
    del store


def warn_of_stale_addresses(environment: Mapping[str, str]) -> bool:
    """Warn if this start may find addresses of workers that are gone; return whether it warned.

    With the agent's own store, torch 2.13 keeps the addresses of an earlier attempt in the place where this attempt
    finds its own. Gloo may then connect to a process that was killed, and fail or wait.

    Args:
        environment: variables of the process.

    Example:
        >>> warn_of_stale_addresses({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
        False
    """
    again = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if again and shared:
        log.warning(
            "torchrun has started the workers again with the store of the earlier attempt: they may wait for workers "
            "that are gone. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or "
            "--rdzv-backend=c10d."
        )
    return again and shared
