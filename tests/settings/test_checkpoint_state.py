"""Files that exist as a whole or not at all, and state that cannot be read or has changed, told as what it is."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

from lightning_hetero.core.checkpoint_state import (
    CheckpointStateError,
    DamagedCheckpointError,
    changed_since,
    check_checksums,
    reading_state,
    with_checksums,
)
from lightning_hetero.core.whole_file import damage_of, write_file

# state that cannot be read


@pytest.mark.parametrize("error", [KeyError, TypeError, OverflowError])
def test_what_malformed_values_raise_is_named_with_the_innermost_state_that_was_read(error):
    with (
        pytest.raises(CheckpointStateError, match=f"the plans .*{error.__name__}") as raised,
        reading_state("all"),
        reading_state("the plans"),
    ):
        raise error("lost")
    assert isinstance(raised.value.__cause__, error)
    with pytest.raises(RuntimeError, match="out of memory"), reading_state("the plans"):
        raise RuntimeError("out of memory")


# state that has changed

STATE = {
    "number": 0.1,
    "none": None,
    "deep": {1: [(2, "a"), True], "x": {"y": -0.0}},
    "array": np.arange(4.0),
    "tensor": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 0.10000000000000002),
        ("deep", {1: [(2, "a"), True], "x": {"y": 0.0}}),
        ("deep", {1: [2, "a", True], "x": {"y": -0.0}}),
        ("array", np.arange(4.0).reshape(2, 2)),
        ("tensor", torch.tensor([[1.0, 2.0]])),
    ],
)
def test_a_value_that_changed_is_named_whatever_it_is(name, value):
    state = with_checksums(STATE)
    check_checksums(state, "the session")
    for changed in ({**state, name: value}, {key: value for key, value in state.items() if key != name}):
        with pytest.raises(DamagedCheckpointError, match=f"the session .*'{name}'"):
            check_checksums(changed, "the session")


def test_a_state_may_be_kept_in_any_way_and_be_a_part_of_another():
    plain = {"steps": 3.0, "by": {2: [1.5, None]}, "name": "é\ud800"}
    state = with_checksums(plain)
    for again in (json.loads(json.dumps(state)), {**state, "other": 1}, dict(reversed(list(state.items())))):
        assert changed_since(again) is None
    apart = {**state, **with_checksums({"interval": 1}, "others")}
    assert changed_since(apart) is changed_since(apart, "others") is None
    assert changed_since({**apart, "interval": 2}, "others") == "interval"
    own = with_checksums({"own": [object()], "steps": 1})
    assert changed_since({**own, "own": [object()]}) is None, "what has no bytes of its own does not count"


# files

FORK = multiprocessing.get_context("fork")


def contents(folder):
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def test_an_error_while_writing_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    write_file(tmp_path / "a.json", b"first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a.json", b"second")
    assert contents(tmp_path) == {"a.json": b"first"}


def test_a_file_has_the_rights_that_new_files_have_and_keeps_those_that_it_has(tmp_path):
    path = tmp_path / "a"
    write_file(path, b"")
    (tmp_path / "b").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "b").stat().st_mode
    path.chmod(0o640)
    write_file(path, b"new")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["a", ".a.part"])
def test_no_link_is_followed(tmp_path, name):
    """Neither one of the file's name nor one that somebody has put where the new file might be written."""
    (tmp_path / "other").write_bytes(b"theirs")
    (tmp_path / name).symlink_to(tmp_path / "other")
    write_file(tmp_path / "a", b"ours")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "other").read_bytes()) == (b"ours", b"theirs")


def _writes_for_ever(path, begun):
    def fsync(number):
        begun.send(True)
        time.sleep(600.0)

    os.fsync = fsync
    write_file(path, b"never")


def test_what_a_killed_process_was_writing_goes_at_the_next_write_and_what_a_living_one_writes_stays(tmp_path):
    path, other = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.notes.part"
    other.write_bytes(b"somebody's")
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_writes_for_ever, args=(path, theirs))
    process.start()
    try:
        assert ours.poll(60.0)
        write_file(path, b"first")
        assert len(list(tmp_path.iterdir())) == 3, "the file, somebody's, and the one that is being written"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    write_file(path, b"second")
    assert contents(tmp_path) == {other.name: b"somebody's", path.name: b"second"}


def test_damage_is_named_by_the_part_that_cannot_be_read(tmp_path):
    """By the checksums of its archive; the older format has none, and passes."""
    path, state = tmp_path / "a.ckpt", {"w": torch.arange(1000.0)}
    torch.save(state, path)
    whole = path.read_bytes()
    assert damage_of(path) == ""
    at = whole.index(torch.arange(1000.0).numpy().tobytes()) + 100
    for damaged, says in (
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "data/0"),
        (whole[:-100], "its directory"),
        (b"text", "its directory"),
        (b"", "its directory"),
    ):
        path.write_bytes(damaged)
        assert says in damage_of(path)
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert damage_of(path) == ""
