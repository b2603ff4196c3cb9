"""Folder of a run's record: that of its logger."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["NO_FOLDER", "logger_folder"]

NO_FOLDER = {
    "Trainer": "report='folder', or the Trainer a logger that has one",
    "Fabric": "report='folder' to the strategy, or Fabric a logger that has one",
    "Accelerate": "report='folder' to HeteroPlugin (ACCELERATE_HETERO_REPORT), or Accelerator a project_dir",
}
"""What gives a run a folder, by front end."""


def logger_folder(loggers: Sequence[Any]) -> Path | None:
    """Return the folder of the first of Lightning's loggers, ``None`` if there is no logger or it has none.

    Example:
        >>> from types import SimpleNamespace
        >>> logger_folder([SimpleNamespace(log_dir=None, save_dir="logs")]).name, logger_folder([])
        ('logs', None)
    """
    if not loggers:
        return None
    folders = (getattr(loggers[0], name, None) for name in ("log_dir", "save_dir"))
    # a dummy logger has any attribute, as a function
    return next((Path(folder) for folder in folders if folder and isinstance(folder, str | PathLike)), None)
