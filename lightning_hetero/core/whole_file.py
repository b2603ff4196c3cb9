"""Files that exist as a whole or not at all, and what is wrong with a torch file that was damaged nevertheless."""

import fcntl
import lzma
import os
import re
import secrets
import stat
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["damage_of", "write_file"]

UNREADABLE = (zipfile.BadZipFile, RuntimeError, ValueError, OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of reading a damaged archive."""
SHOWN = 40
"""Letters of a name that the file has that is being written; a name may have 255 bytes in all."""
FOLDER = 0x10
"""Attribute of a folder in an archive."""
CHUNK = 1 << 22
"""Bytes that are read at a time to compare them with their checksum."""


def write_file(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file to a sibling of it, and rename that once it is on the disk.

    Several processes may write one path: each file that a reader sees is whole, and the last one stays. A file keeps
    the permissions of the one that it replaces. A symbolic link of that name is replaced, not followed. What is no
    file, such as a pipe or ``/dev/stdout``, is written to as it is. What a killed process left goes at the next call.

    Raises:
        OSError: if it cannot be written, for example to a full disk; the old file of that name is still there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.json")
        >>> write_file(path, b"{}")
        >>> path.read_text(), [one.name for one in path.parent.iterdir()]
        ('{}', ['a.json'])
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    with suppress(OSError):  # a folder that cannot be listed
        _remove_leftovers(path)
    part, file = _new_part(path, 0o666 if mode is None else mode)
    try:
        with file:  # its lock lasts until it has its name
            if mode is not None:
                with suppress(OSError):  # not every file system has permissions
                    os.fchmod(file.fileno(), mode)
            file.write(content)
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


def _new_part(path: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Return a new locked file beside a path, and its own path. A lock ends with its process, however that ends."""
    while True:
        part = path.with_name(f".{path.name[:SHOWN]}.{secrets.token_hex(8)}.part")
        file = open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if part.exists():
            return part, file
        file.close()  # another process took it for a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    """Remove the files beside a path that processes were writing when they were killed: those that nobody locks."""
    ours = re.compile(rf"\.{re.escape(path.name[:SHOWN])}\.[0-9a-f]{{16}}\.part")
    for one in path.parent.iterdir():
        if not ours.fullmatch(one.name):
            continue
        with suppress(OSError):  # it is locked, gone, or not a file
            part = os.open(one, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                one.unlink()
            finally:
                os.close(part)


def damage_of(path: Path) -> str:
    """Return what is wrong with a torch file, by the directory of its archive and by its checksums; ``""`` if nothing.

    The older format has neither, and passes. So do contents that were saved without checksums, see
    ``torch.serialization.set_crc32_options``.

    Example:
        >>> import tempfile
        >>> import torch
        >>> path = Path(tempfile.mkdtemp(), "a.ckpt")
        >>> torch.save(torch.zeros(1000), path)
        >>> damage_of(path)
        ''
        >>> content = bytearray(path.read_bytes())
        >>> content[1500] ^= 1
        >>> path.write_bytes(content) > 0
        True
        >>> damage_of(path)
        "a/data/0: Bad CRC-32 for file 'a/data/0'"
    """
    with path.open("rb") as file:
        if file.read(2) == b"\x80\x02":
            return ""
    record = "its directory"
    try:
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                record = one.filename
                if one.external_attr & FOLDER:
                    return f"{record} is marked as a folder, which torch reads as zeros"
                if one.CRC:
                    _read_all(archive, one)
    except UNREADABLE as error:
        return f"{record}: {error}"
    return ""


def _read_all(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where its checksum is compared."""
    with archive.open(record) as file:
        while file.read(CHUNK):
            pass
