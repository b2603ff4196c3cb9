"""A file is written whole or not at all. What is damaged in a torch file: see tests/strategies/test_whole_files.py."""

import os

import pytest

from lightning_hetero.core.whole_file import damage_of, write_file


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


def test_what_is_no_archive_is_named_by_the_part_that_cannot_be_read(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(b"text")
    assert damage_of(tmp_path / "a.ckpt").startswith("its directory: ")
