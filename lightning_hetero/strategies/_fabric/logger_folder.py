"""Folder of a Fabric object's logger, for a strategy, to which Fabric gives no reference to itself."""

import inspect
from pathlib import Path
from typing import Any

from lightning_hetero.frontend.report.folder import logger_folder

__all__ = ["folder_of_caller"]

CALLERS = 8
"""Most callers that are looked at; Fabric is the next but one."""


def folder_of_caller(strategy: object) -> Path | None:
    """Return the folder of the first logger of the Fabric object whose method sets up this strategy.

    Args:
        strategy: the strategy, in a method that Fabric has called.

    Returns:
        The folder, ``None`` without a logger that has one, or where no Fabric object calls.
    """
    frame = inspect.currentframe()
    for _ in range(CALLERS):
        frame = None if frame is None else frame.f_back
        caller: Any = None if frame is None else frame.f_locals.get("self")
        if _is_named(caller, "Fabric") and caller.strategy is strategy:
            if caller.loggers and _is_named(caller.loggers[0], "CSVLogger"):
                caller.loggers[0].experiment  # noqa: B018 - made first: it warns of a folder that has files
            return logger_folder(caller.loggers)
    return None


def _is_named(found: object, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(found).__mro__)
