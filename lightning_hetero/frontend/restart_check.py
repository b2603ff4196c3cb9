"""Warning of stale addresses before joining a process group that torchrun has restarted."""

from collections.abc import Mapping

from lightning_hetero.frontend.log import log

__all__ = ["warn_of_stale_addresses"]


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
