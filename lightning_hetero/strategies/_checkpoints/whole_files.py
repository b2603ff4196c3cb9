"""Checkpoint files that exist as a whole or not at all, and errors for those that are damaged nevertheless."""

import functools
import importlib
import io
import logging
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

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

__all__ = ["DamagedCheckpointError", "WholeFilesMixin", "read_or_fall_back", "write_whole"]

log = logging.getLogger("lightning_hetero")

SUFFIX = ".ckpt"
LAST = "last"
"""Beginning of the names of files that always stand for the newest checkpoint."""


class DamagedCheckpointError(RuntimeError):
    """Error of a checkpoint file that is not whole."""


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
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # not every file system can sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_or_fall_back(load: Callable[[str | os.PathLike[str]], T], path: str | os.PathLike[str]) -> T:
    """Read a checkpoint; if it is a ``last`` one that is not whole, read the newest whole one beside it.

    Args:
        load: reads a file.
        path: path of the checkpoint.

    Raises:
        DamagedCheckpointError: if the file is not whole; the message names the whole ones beside it.
    """
    try:
        return load(path)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        local = local_path(path)
        if local is None or not local.is_file() or _is_whole(local):
            raise
        beside = _whole_beside(local)
        damage = f"{local} is not a whole checkpoint ({local.stat().st_size} bytes; {type(error).__name__}: {error})"
        if local.name.startswith(LAST) and beside:
            log.warning("%s. Training goes on from the newest one beside it that is whole: %s", damage, beside[0])
            return load(beside[0])
        names = ", ".join(one.name for one in beside[:5]) or "none"
        raise DamagedCheckpointError(
            f"{damage}. Whoever wrote it was killed, or the disk was full. Whole ones beside it, newest first: {names}."
        ) from error


def _whole_beside(path: Path) -> list[Path]:
    others = [one for one in path.parent.glob(f"*{SUFFIX}") if one != path and one.is_file() and _is_whole(one)]
    return sorted(others, key=lambda one: (one.stat().st_mtime_ns, one.name), reverse=True)


def _is_whole(path: Path) -> bool:
    """Return whether a torch file ends with the directory of its archive; the older format, without one, passes."""
    with path.open("rb") as file:
        begins = file.read(2)
    return zipfile.is_zipfile(path) if begins != b"\x80\x02" else True
