"""Checkpoints of sharded models that are looked at before they are read: whole, and without code in their metadata."""

import os
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.core.checkpoint_state import DamagedCheckpointError
from lightning_hetero.frontend.checkpoint_folder import CHECKSUM_FILE, damage_in
from lightning_hetero.strategies._checkpoints.whole_files import read_or_fall_back

__all__ = ["whole_checkpoint"]

METADATA = ".metadata"
"""File of a folder of shards that torch unpickles without restrictions."""
CLASSES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
"""Modules whose classes it consists of."""
MODULES = (*CLASSES, "torch", "torch.serialization", "pathlib", "pathlib._local")


def whole_checkpoint(given: str | os.PathLike[str], control: ControlPlane) -> Path:
    """Return a checkpoint, or the one to read in place of a damaged ``last`` file; a collective call.

    Args:
        given: a file, or a folder of shards.
        control: of all ranks, each of which reads a part of the files of a folder.

    Raises:
        DamagedCheckpointError: on every rank, if a file has changed since it was saved, or the metadata of a folder
            would call what torch's own never call.
    """
    path: Path = control.decide(lambda: Path(read_or_fall_back(lambda one: one, given)))
    if not control.decide(path.is_dir):
        return path
    damage = damage_in(path, control) or control.decide(lambda: _odd_metadata(path / METADATA))
    if damage:
        raise DamagedCheckpointError(
            f"{path} is not a whole checkpoint ({damage}). Whoever wrote it was killed, the disk was full, or a file "
            f"has changed since. Use an earlier one. If files were changed on purpose, delete {CHECKSUM_FILE} in it."
        )
    return path


def _odd_metadata(path: Path) -> str:
    """Return why the metadata of a folder of shards should not be unpickled, ``""`` if nothing is known against it."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            _Metadata(file).load()
    except Exception as error:  # noqa: BLE001 - damaged pickles raise errors of every kind
        return f"{METADATA}: {error}"
    return ""


class _Metadata(pickle.Unpickler):
    """Reads what torch writes about shards, and calls nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class of shards, a plain value of torch, or a path."""
        found = super().find_class(module, name) if module in MODULES and "." not in name else None
        own = isinstance(found, type) and (found.__module__ == module in CLASSES or issubclass(found, PurePath))
        if own or isinstance(found, torch.dtype) or found in (torch.Size, torch.serialization._get_layout):
            return found
        raise pickle.UnpicklingError(f"it calls {module}.{name}, which torch's own metadata never do")
