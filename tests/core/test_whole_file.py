"""A file is written whole or not at all. What is damaged in a torch file: see tests/strategies/test_whole_files.py."""

import multiprocessing
import os
import signal
import time

import pytest

from lightning_hetero.core.whole_file import damage_of, write_file

FORK = multiprocessing.get_context("fork")


def test_an_error_while_writing_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_file(path, b"first")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"second")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a.json", b"first")]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_file(path, b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert path.is_fifo()


def test_a_file_has_the_rights_that_new_files_have(tmp_path):
    write_file(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"secret")
    for mode in (0o600, 0o666, 0o640):
        path.chmod(mode)
        write_file(path, b"new")
        assert (path.stat().st_mode & 0o777, path.read_bytes()) == (mode, b"new")


@pytest.mark.parametrize("name", ["a", ".a.part"])
def test_no_link_is_followed(tmp_path, name):
    """Neither one of the file's name nor one that somebody has put where the new file might be written."""
    (tmp_path / "other").write_bytes(b"theirs")
    (tmp_path / name).symlink_to(tmp_path / "other")
    write_file(tmp_path / "a", b"ours")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "other").read_bytes()) == (b"ours", b"theirs")


@pytest.mark.parametrize("name", ["n" * 255, "\u00e9" * 127, "a[*]?"])
def test_any_name_will_do(tmp_path, name):
    for content in (b"first", b"second"):
        write_file(tmp_path / name, content)
        assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(name, content)]


def _writes_often(path, content):
    for _ in range(40):
        write_file(path, content)


def test_two_processes_may_write_one_file(tmp_path):
    path, contents = tmp_path / "last.ckpt", [bytes([letter]) * 1_000_000 for letter in b"AB"]
    write_file(path, contents[0])
    writers = [FORK.Process(target=_writes_often, args=(path, content)) for content in contents]
    for one in writers:
        one.start()
    seen = set()
    while any(one.is_alive() for one in writers):
        seen.add(path.read_bytes())
    for one in writers:
        one.join()
    assert [one.exitcode for one in writers] == [0, 0]
    assert {*seen, path.read_bytes()} <= set(contents)
    assert list(tmp_path.iterdir()) == [path]


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
    assert sorted(tmp_path.iterdir()) == [other, path]
    assert path.read_bytes() == b"second"


def test_what_is_no_archive_is_named_by_the_part_that_cannot_be_read(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(b"text")
    assert damage_of(tmp_path / "a.ckpt").startswith("its directory: ")
