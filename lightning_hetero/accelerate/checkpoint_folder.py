"""Folders of checkpoints that Accelerate and Transformers write: which are whole, by checksums of their files.

The checksums are a file as ``sha256sum --check`` reads it. It is empty while the others are written, and ends with a
line that says so. Folders without it, such as those of plain Accelerate, count as whole if our state in them is.
"""

import hashlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from lightning_hetero.core.checkpoint_state import DamagedCheckpointError
from lightning_hetero.core.whole_file import CHUNK, damage_of, write_file
from lightning_hetero.frontend.log import log

__all__ = [
    "CHECKSUM_FILE",
    "STATE_FILE",
    "TRAINER_STATE",
    "begin_folder",
    "damage_in",
    "end_folder",
    "newest_folder",
    "whole_folder",
]

STATE_FILE = "hetero_state.pt"
CHECKSUM_FILE = "hetero_state.sha256"
TRAINER_STATE = "trainer_state.json"
RESUMED = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".index.json", TRAINER_STATE)
"""Endings of the files that a training resumes from."""
END = "# end"
LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")
DIGITS = "0123456789"


def begin_folder(folder: str | Path) -> None:
    """Say that the files of a checkpoint are about to be written into a folder, which is made if it is not there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(Path(folder, CHECKSUM_FILE), b"")


def end_folder(folder: str | Path) -> None:
    """Write the checksums of all files that a training resumes from and that were written since :func:`begin_folder`.

    Files in folders inside are left out: a folder of checkpoints may be in it.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> begin_folder(folder)
        >>> Path(folder, "optimizer.bin").write_bytes(b"state")
        5
        >>> damage_in(folder)
        'writing it was not finished'
        >>> end_folder(folder)
        >>> damage_in(folder)
        ''
    """
    begun = Path(folder, CHECKSUM_FILE).stat().st_mtime_ns
    found = sorted(one for one in Path(folder).iterdir() if one.name.endswith(RESUMED))
    new = [one for one in found if one.is_file() and one.stat().st_mtime_ns >= begun]
    lines = [f"{_sha256(one)}  {one.name}" for one in new]
    write_file(Path(folder, CHECKSUM_FILE), "\n".join([*lines, END, ""]).encode())


def damage_in(folder: str | Path) -> str:
    """Return what is wrong with the files of a checkpoint, ``""`` if nothing is known to be."""
    sums, state = Path(folder, CHECKSUM_FILE), Path(folder, STATE_FILE)
    if sums.is_file():
        return _difference(Path(folder), sums.read_bytes())
    if state.is_file():
        damage = damage_of(state)
        return damage and f"{STATE_FILE}: {damage}"
    return "" if any(not one.name.startswith(".") for one in Path(folder).iterdir()) else "it is empty"


def _difference(folder: Path, content: bytes) -> str:
    """Return how the files of a folder differ from their checksums."""
    lines = content.decode(errors="replace").split("\n")
    if not content:
        return "writing it was not finished"
    if lines[-2:] != [END, ""]:
        return f"{CHECKSUM_FILE} does not end as it should"
    for line in lines[:-2]:
        found = LINE.fullmatch(line)
        if found is None:
            return f"{CHECKSUM_FILE} has a line that is none of its own"
        path = folder / found[2]
        if not path.is_file():
            return f"{found[2]} is missing"
        if _sha256(path) != found[1]:
            return f"{found[2]} is not as it was written"
    return ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(CHUNK):
            digest.update(content)
    return digest.hexdigest()


def newest_folder(folder: str | Path) -> Path | None:
    """Return the folder in another one whose name ends with the greatest number, ``None`` if none does.

    Example:
        >>> import tempfile
        >>> above = Path(tempfile.mkdtemp())
        >>> for name in ("checkpoint_9", "checkpoint_10", "logs"):
        ...     (above / name).mkdir()
        >>> newest_folder(above).name
        'checkpoint_10'
    """
    if not Path(folder).is_dir():
        return None
    return max((one for one in Path(folder).iterdir() if one.is_dir() and _number(one) >= 0), key=_number, default=None)


def _number(folder: Path) -> int:
    """Return the number that a folder's name ends with, -1 if there is none."""
    return int(folder.name[len(folder.name.rstrip(DIGITS)) :] or -1)


def whole_folder(folder: str | Path, *, newest: bool = False, needed: Collection[str] = ()) -> Path:
    """Return a folder if its checkpoint is whole; else, if the newest was asked for, the newest one beside it that is.

    Args:
        folder: the checkpoint.
        newest: whether it was asked for as the newest one, not by its name.
        needed: names of files that every whole one has.

    Raises:
        DamagedCheckpointError: if it is damaged and none beside it may be taken; the message names one that is whole.
    """
    path = Path(folder)
    damage = _damage(path, needed)
    if not damage:
        return path
    whole = next((one for one in _beside(path) if not _damage(one, needed)), None)
    text = f"{path} is not a whole checkpoint ({damage})"
    if newest and whole is not None:
        log.warning("%s. Training goes on from the newest one beside it that is whole: %s", text, whole)
        return whole
    raise DamagedCheckpointError(
        f"{text}. Whoever wrote it was killed, the disk was full, or a file has changed since. The newest whole one "
        f"beside it: {'none' if whole is None else whole.name}. If files were changed on purpose, delete "
        f"{CHECKSUM_FILE} in it; if another program has replaced them, {STATE_FILE} as well."
    )


def _damage(folder: Path, needed: Collection[str]) -> str:
    missing = [name for name in needed if not (folder / name).is_file()]
    return damage_in(folder) or (f"{missing[0]} is missing" if missing else "")


def _beside(folder: Path) -> Iterator[Path]:
    """Yield checkpoints of this package beside another: the newest first, and if it has a number, only its series."""
    series = folder.name.rstrip(DIGITS)
    others = [one for one in folder.parent.iterdir() if one != folder and (one / STATE_FILE).is_file()]
    if series != folder.name:
        others = [one for one in others if one.name.rstrip(DIGITS) == series]
    yield from sorted(others, key=lambda one: (_number(one), (one / STATE_FILE).stat().st_mtime_ns), reverse=True)
