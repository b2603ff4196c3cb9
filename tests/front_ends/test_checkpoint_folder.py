"""Folders of checkpoints: what has changed since it was written is named, and the newest whole one is found."""

import os

import pytest
import torch

from lightning_hetero.core import DamagedCheckpointError
from lightning_hetero.frontend.checkpoint_folder import (
    CHECKSUM_FILE,
    STATE_FILE,
    begin_folder,
    damage_in,
    end_folder,
    newest_folder,
    whole_folder,
)

FILES = {"model.safetensors": b"weights" * 30, "optimizer.bin": b"state" * 30, "random_states_1.pkl": b"random" * 30}


def written(folder, files=FILES):
    """A checkpoint; while it was written, a clock was set back by a day."""
    begin_folder(folder)
    torch.save({"epoch": 1}, folder / STATE_FILE)
    now = (folder / CHECKSUM_FILE).stat().st_mtime - 86_400
    for name, content in files.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, (now, now + len(content)))
    end_folder(folder)
    return folder


def flip(path, at=100, bit=1):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


DAMAGES = {
    "a bit": flip,
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "all of it": os.remove,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_changed_is_named(damage, tmp_path):
    for name in (*FILES, STATE_FILE):
        folder = written(tmp_path / name)
        assert damage_in(folder) == ""
        DAMAGES[damage](folder / name)
        assert damage_in(folder).startswith(name)
        assert ("missing" in damage_in(folder)) == (damage == "all of it")


def test_every_byte_and_every_end_of_the_checksums_matters(tmp_path):
    folder = written(tmp_path / "state", {"model.safetensors": b"weights"})
    path = folder / CHECKSUM_FILE
    content = path.read_bytes()
    for at in range(len(content)):
        flip(path, at, 1 << at % 8)
        assert damage_in(folder), at
        path.write_bytes(content[:at])
        assert damage_in(folder), at
        path.write_bytes(content)
    assert damage_in(folder) == ""


def test_what_was_killed_while_it_was_written_is_not_whole(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    assert damage_in(folder)
    begin_folder(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    assert damage_in(folder)
    assert damage_in(written(folder)) == ""
    begin_folder(folder)  # it is written a second time
    assert damage_in(folder)


def test_files_of_the_users_and_folders_without_checksums_are_as_they_are(tmp_path):
    folder = tmp_path / "state"
    (folder / "inside").mkdir(parents=True)
    (folder / "theirs.pt").write_bytes(b"before")
    os.utime(folder / "theirs.pt", (1, 1))
    written(folder, {**FILES, "config.json": b"{}", "inside/model.bin": b"another"})
    for name in ("theirs.pt", "config.json", "later.bin", "inside/model.bin"):
        (folder / name).write_bytes(b"now")
    assert damage_in(folder) == ""
    (folder / CHECKSUM_FILE).unlink()  # as plain Accelerate writes them
    flip(folder / "model.safetensors")
    assert damage_in(folder) == ""
    DAMAGES["its end"](folder / STATE_FILE)
    assert damage_in(folder).startswith(STATE_FILE)


def test_the_newest_whole_folder_of_a_series_is_taken_with_a_warning_or_named_for_one_that_was_asked_for(
    tmp_path, caplog
):
    series = tmp_path
    for name in ("checkpoint-8", "checkpoint-9", "checkpoint-10", "best-11"):
        written(series / name)
    assert newest_folder(series).name == "best-11"
    assert whole_folder(series / "checkpoint-10") == series / "checkpoint-10"
    flip(series / "checkpoint-10" / "model.safetensors")
    (series / "checkpoint-8" / "trainer_state.json").write_text("{}")
    with caplog.at_level("WARNING", "lightning_hetero"):
        assert whole_folder(series / "checkpoint-10", newest=True) == series / "checkpoint-9"
        needed = whole_folder(series / "checkpoint-10", newest=True, needed=("trainer_state.json",))
    assert needed == series / "checkpoint-8"
    assert len(caplog.messages) == 2
    for text in ("checkpoint-10", "model.safetensors", str(series / "checkpoint-9")):
        assert text in caplog.messages[0]
    for damaged, whole in (("", "checkpoint-9"), ("checkpoint-9", "checkpoint-8"), ("checkpoint-8", "none")):
        if damaged:
            flip(series / damaged / "model.safetensors")
        for newest in (False, True) if whole == "none" else (False,):
            with pytest.raises(DamagedCheckpointError, match=f"checkpoint-10.*model.safetensors.*{whole}"):
                whole_folder(series / "checkpoint-10", newest=newest)
