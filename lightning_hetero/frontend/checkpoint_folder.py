"""Folders of checkpoints, of Accelerate, Transformers and sharded models: which are whole, by checksums of their files.

The checksums are a file as ``sha256sum --check`` reads it, which ends with a line that says so. While the others are
written, it says which were there before. Folders without it, such as those of plain Accelerate and ``fsdp``, count as
whole if our state in them is.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_hetero.comm.agreement.control_plane import ControlPlane
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
T = TypeVar("T")

OURS = (STATE_FILE, CHECKSUM_FILE)
TRAINER_STATE = "trainer_state.json"
RESUMED = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".index.json", ".distcp", ".metadata", TRAINER_STATE)
"""Endings of the files that a training resumes from."""
END = "# end"
LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")
DIGITS = "0123456789"


def begin_folder(folder: str | Path) -> None:
    """Say that the files of a checkpoint are about to be written into a folder, which is made if it is not there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    there = _resumed(folder)
    write_file(Path(folder, CHECKSUM_FILE), json.dumps(there).encode() if there else b"")


def end_folder(folder: str | Path, control: ControlPlane | None = None) -> None:
    """Write the checksums of all files that a training resumes from and that were written since :func:`begin_folder`.

    Files in folders inside are left out: a folder of checkpoints may be in it.

    Args:
        folder: the checkpoint; all of its files have been written.
        control: reads a part of the files on each rank; a collective call then. By default, this process reads them.

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
    path = Path(folder, CHECKSUM_FILE)

    def new() -> list[str]:
        before = json.loads(path.read_bytes() or "{}")
        return [name for name, state in _resumed(folder).items() if state != before.get(name)]

    sums = _sums(folder, _decided(new, control), control)

    def write() -> None:
        # the rank that has listed a file sees it, also where another host does not yet
        lines = [f"{found or _sha256(Path(folder, name))}  {name}" for name, found in sums]
        write_file(path, "\n".join([*lines, END, ""]).encode())

    _decided(write, control)


def _decided(decision: Callable[[], T], control: ControlPlane | None) -> T:
    value: T = decision() if control is None else control.decide(decision)
    return value


def _resumed(folder: str | Path) -> dict[str, list[int]]:
    """Return the files of a folder that a training resumes from, with what changes when they are written."""
    found = sorted(one for one in Path(folder).iterdir() if one.name.endswith(RESUMED) and one.is_file())
    return {one.name: [one.stat().st_mtime_ns, one.stat().st_size] for one in found}


def damage_in(folder: str | Path, control: ControlPlane | None = None) -> str:
    """Return what is wrong with the files of a checkpoint, ``""`` if nothing is known to be.

    Args:
        folder: the checkpoint.
        control: reads a part of the files on each rank; a collective call then. By default, this process reads them.
    """
    damage, recorded = _decided(lambda: _recorded(Path(folder)), control)
    for name, found in _sums(folder, list(recorded), control):
        if found != recorded[name]:
            return f"{name} is {'not as it was written' if found else 'missing'}"
    return damage


def _recorded(folder: Path) -> tuple[str, dict[str, str]]:
    """Return what is wrong with a folder apart from its files' contents, and their checksums by name."""
    sums, state = folder / CHECKSUM_FILE, folder / STATE_FILE
    if not sums.is_file():
        if not state.is_file():
            return "" if any(not one.name.startswith(".") for one in folder.iterdir()) else "it is empty", {}
        damage = damage_of(state)
        return damage and f"{STATE_FILE}: {damage}", {}
    lines = sums.read_bytes().decode(errors="replace").split("\n")
    if lines[-2:] != [END, ""]:
        return "writing it was not finished", {}
    found = [LINE.fullmatch(line) for line in lines[:-2]]
    if None in found:
        return f"{CHECKSUM_FILE} has a line that is none of its own", {}
    return "", {one[2]: one[1] for one in found if one is not None}


def _sums(folder: str | Path, names: Sequence[str], control: ControlPlane | None) -> list[tuple[str, str]]:
    """Return names of files with their checksums, ``""`` for one that is missing; every rank reads its part of them."""
    rank, ranks = (0, 1) if control is None else (control.rank, control.world_size)
    own: list[tuple[str, str]] | OSError
    try:
        paths = [Path(folder, name) for name in names[rank::ranks]]
        own = [(path.name, _sha256(path) if path.is_file() else "") for path in paths]
    except OSError as error:  # every rank has to raise it
        own = error
    found: list[tuple[str, str]] = []
    for one in [own] if control is None else control.gather_objects(own):
        if isinstance(one, OSError):
            raise one
        found += one
    return sorted(found)


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
    others = [one for one in folder.parent.iterdir() if one != folder and any((one / name).is_file() for name in OURS)]
    if series != folder.name:
        others = [one for one in others if one.name.rstrip(DIGITS) == series]
    yield from sorted(others, key=lambda one: (_number(one), one.stat().st_mtime_ns), reverse=True)
