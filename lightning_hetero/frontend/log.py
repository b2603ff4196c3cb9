"""The package's logger, shown at level INFO unless logging is set up already."""

import logging

__all__ = ["log", "show_log"]


log = logging.getLogger("lightning_hetero")


def show_log() -> None:
    """Show our lines at level INFO unless logging is set up already, as Lightning does, so nothing changes silently."""
    if not logging.getLogger().hasHandlers() and not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
