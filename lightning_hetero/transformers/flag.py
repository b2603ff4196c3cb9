"""Trainers by the switch alone: ``transformers.Trainer`` is replaced by one for unequal workers, and put back."""

import os
import sys
from typing import Any

import transformers.trainer as module

from lightning_hetero.accelerate.plugin import SWITCH
from lightning_hetero.transformers.trainer import HeteroTrainer

__all__ = ["adapt", "adapt_if_switched_on", "restore"]

LAZY = "transformers"  # keeps Trainer once it was asked for


def adapt() -> None:
    """Make ``transformers.Trainer`` one for unequal workers, so that all trainers defined from now on derive from it.

    Call it right after ``transformers.trainer`` was imported, before modules that define trainers of their own. A
    second call does nothing; :func:`restore` undoes it.

    Example:
        >>> adapt(); issubclass(module.Trainer, HeteroTrainer)
        True
        >>> restore(); issubclass(module.Trainer, HeteroTrainer)
        False
    """
    original = module.Trainer
    if not issubclass(original, HeteroTrainer):
        same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        _put(type(original.__name__, (HeteroTrainer,), same))


def adapt_if_switched_on() -> None:
    """Adapt if ``ACCELERATE_USE_HETERO`` is set and not false; a text that is neither is an error of the trainer."""
    if os.environ.get(SWITCH, "").strip().lower() not in ("", "false", "0", "no", "off"):
        adapt()


def restore() -> None:
    """Put Transformers' own ``Trainer`` back; trainers that were defined in the meantime stay as they are."""
    if issubclass(module.Trainer, HeteroTrainer):
        _put(HeteroTrainer.__base__)


def _put(trainer: Any) -> None:
    package = sys.modules[LAZY]
    if "Trainer" in vars(package):
        vars(package)["Trainer"] = trainer
    vars(module)["Trainer"] = trainer
