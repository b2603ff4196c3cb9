"""SIGTERM where ranks are at batches of their own: noted by the rank that gets it, obeyed by all at the next merge."""

import signal
from collections.abc import Callable
from typing import Any

__all__ = ["defer_sigterm"]


def defer_sigterm(trainer: Any, note: Callable[[], None]) -> None:
    """Put ``note`` in the place of Lightning's handler, which broadcasts to all ranks from within the signal.

    Handlers besides Lightning's stay, and so does the forwarding to processes that Lightning started.

    Args:
        trainer: whose handler is installed.
        note: called at each SIGTERM.
    """
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])

    def handler(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        note()

    for index, existing in enumerate(handlers):
        if getattr(existing, "__name__", "") == "_sigterm_notifier_fn":
            handlers[index] = handler
