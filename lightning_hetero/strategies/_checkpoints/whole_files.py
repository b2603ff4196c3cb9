"""Checkpoint files that exist as a whole or not at all, and errors for those that are damaged nevertheless."""

import functools
import importlib
import io
import logging
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_hetero.core.checkpoint_state import DamagedCheckpointError
from lightning_hetero.core.whole_file import damage_of, write_file

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

    class Strategy:
        """The part that the strategies of the Trainer and of Fabric have in common."""

        _checkpoint_io: CheckpointIO | None

        @property
        def checkpoint_io(self) -> CheckpointIO: ...  # noqa: D102

        @checkpoint_io.setter
        def checkpoint_io(self, io: CheckpointIO) -> None: ...
else:
    Strategy = object

T = TypeVar("T")

__all__ = ["WholeFilesMixin", "read_or_fall_back", "write_whole"]

log = logging.getLogger("lightning_hetero")

SUFFIX = ".ckpt"
LAST = "last"
"""Beginning of the names of files that always stand for the newest checkpoint."""


class WholeFilesMixin(Strategy):
    """Checkpoints that are written to a sibling file and renamed, where Lightning's own plugin would write them.

    Lightning writes to the folder for temporary files and moves the result. Across file systems a move is a copy, which
    a kill or a full disk leaves truncated under the final name. Plugins of the user stay as they are.
    """

    @property
    def checkpoint_io(self) -> "CheckpointIO":
        """The plugin that reads and writes files."""
        given: Any = self._checkpoint_io
        if hasattr(given, "checkpoint_io") and given.checkpoint_io is None:  # it wraps another, as AsyncCheckpointIO
            given.checkpoint_io = _whole(_plain(given))()
        plugin = super().checkpoint_io
        if given is None:
            self.checkpoint_io = plugin = _whole(type(plugin))()
        return plugin

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: "CheckpointIO") -> None:
        self._checkpoint_io = plugin


def _plain(plugin: "CheckpointIO") -> "type[CheckpointIO]":
    """Return Lightning's plugin for torch files, from the same package as another plugin."""
    base = next(cls for cls in type(plugin).__mro__ if cls.__name__ == "CheckpointIO")
    module = importlib.import_module(base.__module__.replace("checkpoint_io", "torch_io"))
    plain: type[CheckpointIO] = module.TorchCheckpointIO
    return plain


@functools.cache
def _whole(base: "type[CheckpointIO]") -> "type[CheckpointIO]":
    kind: Any = base

    class TorchCheckpointIO(kind):
        """Lightning's plugin, with whole files."""

        def save_checkpoint(
            self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
        ) -> None:
            local = local_path(path)
            if local is None or storage_options is not None:
                super().save_checkpoint(checkpoint, path, storage_options)
            else:
                write_whole(checkpoint, local)

        def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
            plain = super().load_checkpoint
            return read_or_fall_back(lambda one: plain(one, *args, **kwargs), path)

        def __reduce__(self) -> "tuple[Callable[..., CheckpointIO], tuple[type[CheckpointIO]]]":
            return _new, (base,)

    return TorchCheckpointIO


def _new(base: "type[CheckpointIO]") -> "CheckpointIO":
    return _whole(base)()


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """Return the path in the local file system, ``None`` if it is in another.

    Example:
        >>> str(local_path("/a/b.ckpt")), local_path("memory://b.ckpt")
        ('/a/b.ckpt', None)
    """
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None


def write_whole(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint to a sibling file, and rename that once it is on the disk.

    Raises:
        OSError: if it cannot be written, for example to a full disk; the old file of that name is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(checkpoint, content)
    write_file(path, content.getbuffer())


def read_or_fall_back(load: Callable[[str | os.PathLike[str]], T], path: str | os.PathLike[str]) -> T:
    """Read a checkpoint; if it is a ``last`` one that is damaged, read the newest whole one beside it.

    The file is compared with its checksums first, because what a flipped bit has changed loads like any other number.

    Args:
        load: reads a file.
        path: path of the checkpoint.

    Raises:
        DamagedCheckpointError: if the file is damaged; the message names the whole ones beside it.
    """
    local = local_path(path)
    if local is None or not local.is_file():
        return load(path)
    damage = damage_of(local)
    if not damage:
        try:
            return load(path)
        except RuntimeError as error:  # what says nothing of the contents is not under a checksum
            if "PytorchStreamReader" not in str(error):
                raise
            damage = str(error)
    beside = _whole_beside(local)
    text = f"{local} is not a whole checkpoint ({local.stat().st_size} bytes; {damage})"
    if local.name.startswith(LAST) and beside:
        log.warning("%s. Training goes on from the newest one beside it that is whole: %s", text, beside[0])
        return load(beside[0])
    names = ", ".join(one.name for one in beside) or "none"
    raise DamagedCheckpointError(
        f"{text}. Whoever wrote it was killed, the disk was full, or a bit has changed since. Whole ones beside it, "
        f"newest first: {names}."
    )


def _whole_beside(path: Path) -> list[Path]:
    """Return the newest whole checkpoints of a folder besides this one, at most five: by step, if that can be read.

    What a ``last`` one cannot have come after is of another run.
    """
    others = [one for one in path.parent.glob(f"*{SUFFIX}") if one != path and one.is_file()]
    steps = {one: _step(one) for one in others}
    end = _step(path) if path.name.startswith(LAST) else -1
    others = [one for one in others if end < 0 or steps[one] <= end]
    newest = sorted(others, key=lambda one: (steps[one], one.stat().st_mtime_ns, one.name), reverse=True)
    return list(islice((one for one in newest if not damage_of(one)), 5))


def _step(path: Path) -> int:
    """Return the step at which a checkpoint was saved, -1 if it cannot be read; no tensor is read."""
    try:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # noqa: BLE001 - damaged files raise errors of every kind
        return -1
