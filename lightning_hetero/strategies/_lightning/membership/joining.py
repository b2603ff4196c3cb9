"""Callbacks and loggers of a worker that joins a training which runs already."""

import csv
import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["join_running"]

ROWS = "metrics.csv"
ASIDE = f"{ROWS}.kept"


def join_running(trainer: "Trainer") -> None:
    """Let what acts once in a training act as on the workers that have begun it; call it before ``setup`` hooks."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if _is_a(callback, "SaveConfigCallback"):  # in its setup it would wait for workers that have done this
            vars(callback)["already_saved"] = True
    for logger in trainer.loggers:
        if trainer.is_global_zero and _is_a(logger, "CSVLogger"):
            go_on_in_file(logger)


def go_on_in_file(logger: Any) -> None:
    """Let a ``CSVLogger`` of the next rank 0 go on in the file of the one before, which Lightning would delete."""
    files, folder = logger._fs, logger.log_dir
    path, aside = os.path.join(folder, ROWS), os.path.join(folder, ASIDE)
    if logger._experiment is not None or not files.isfile(path):
        return
    with files.open(path, "r", newline="") as file:
        header = next(csv.reader(file), [])
    files.mv(path, aside)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
            writer = logger.experiment
    finally:
        files.mv(aside, path)
    with suppress(AttributeError):  # a writer of the user's may know no keys
        writer.metrics_keys[:] = header


def _is_a(thing: Any, name: str) -> bool:
    """Return whether a thing is of this class of Lightning's, whichever of its packages is installed."""
    return any(one.__name__ == name and "lightning" in one.__module__.partition(".")[0] for one in type(thing).__mro__)
