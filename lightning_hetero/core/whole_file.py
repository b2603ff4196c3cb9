"""Files that exist as a whole or not at all, and what is wrong with a torch file that was damaged nevertheless."""

import lzma
import os
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

__all__ = ["damage_of", "write_file"]

UNREADABLE = (zipfile.BadZipFile, RuntimeError, ValueError, OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of reading a damaged archive."""
FOLDER = 0x10
"""Attribute of a folder in an archive."""
CHUNK = 1 << 22
"""Bytes that are read at a time to compare them with their checksum."""


def write_file(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file to a sibling of it, and rename that once it is on the disk.

    What is no file, such as a pipe or ``/dev/stdout``, is written to as it is.

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
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
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
