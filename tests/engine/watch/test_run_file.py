"""The file of a record: complete, bounded, readable at any moment, and no danger to the run."""

import errno
import shutil

import pytest

from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.records import FILE_NAME as NAME
from lightning_hetero.core.report.records import ChangeRecord, EndRecord, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.engine.watch import run_file
from lightning_hetero.engine.watch.run_file import RunFile
from tests.recorded import header


def a_round(i):
    return RoundRecord(float(i), 0, i, 1, 1, (8, 8), kept=f"round {i}")


def read(folder):
    with open(folder / NAME, encoding="utf-8") as file:
        return RunRecord.from_lines(file)


def written(folder, rounds=3, **settings):
    file = RunFile(**settings)
    file.write(header(2))
    for i in range(rounds):
        if i == rounds // 2:
            file.open(folder)
        file.write(a_round(i))
    return file


def test_lines_before_and_after_the_folder_is_known_are_in_the_file(tmp_path):
    file = written(tmp_path, rounds=5)
    assert file.path == tmp_path / NAME
    assert [one.step for one in read(tmp_path).rounds] == [0, 1, 2, 3, 4]
    assert file.run == read(tmp_path)


def test_a_folder_is_made_where_there_is_none(tmp_path):
    written(tmp_path / "a" / "b")
    assert len(read(tmp_path / "a" / "b").rounds) == 3


def test_without_a_folder_the_record_is_in_memory():
    file = RunFile()
    assert not file.has_header
    file.write(header(2))
    file.write(a_round(1))
    assert file.has_header
    assert len(file.run.rounds) == 1
    assert file.path is None


def test_a_file_has_one_place(tmp_path):
    file = RunFile()
    file.open(tmp_path / "too early")
    file.write(header(2))
    file.open(tmp_path / "a")
    file.open(tmp_path / "b")
    file.open(tmp_path / "a")
    file.write(a_round(0))
    assert file.path == tmp_path / "a" / NAME
    assert len(file.path.read_text().splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_second_run_follows_the_first(tmp_path):
    written(tmp_path, rounds=2)
    written(tmp_path, rounds=4)
    assert len(read(tmp_path).rounds) == 4
    assert (tmp_path / NAME).read_text().count('"kind":"run"') == 2
    assert all((tmp_path / NAME).read_text().splitlines())


def test_an_empty_file_is_written_to(tmp_path):
    (tmp_path / NAME).touch()
    file = written(tmp_path, rounds=2)
    assert read(tmp_path) == file.run


@pytest.mark.parametrize("cut", [7, 1])
@pytest.mark.parametrize(("max_bytes", "rounds"), [(10**6, 3), (900, 20)])
def test_a_run_that_was_killed_inside_a_line_does_not_swallow_the_next(tmp_path, cut, max_bytes, rounds):
    written(tmp_path, rounds=2)
    whole = (tmp_path / NAME).read_text(encoding="utf-8")
    (tmp_path / NAME).write_text(whole[:-cut], encoding="utf-8")
    file = written(tmp_path, rounds=rounds, max_bytes=max_bytes)
    assert read(tmp_path).rounds == file.run.rounds
    assert len(file.run.rounds) + file.dropped == rounds
    assert (tmp_path / NAME).read_text(encoding="utf-8").count('{"kind":"run"') == 2


@pytest.mark.parametrize("earlier", [0, 3])
def test_its_size_is_bounded_and_its_ends_stay(tmp_path, earlier):
    if earlier:
        written(tmp_path, rounds=earlier)
    before = (tmp_path / NAME).stat().st_size if earlier else 0
    budget = 4000
    file = written(tmp_path, rounds=1000, max_bytes=budget)
    assert (tmp_path / NAME).stat().st_size - before <= budget
    found = read(tmp_path)
    assert found == file.run
    assert found.rounds[0].step == 0
    assert found.rounds[-1].step == 999
    assert len(found.rounds) + file.dropped == 1000
    assert len(found.rounds) > 10
    if earlier:
        assert (tmp_path / NAME).read_text().count('"kind":"run"') == 2
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_lines_that_are_dropped_are_counted(tmp_path):
    file = RunFile(max_bytes=4000)
    file.write(header(2))
    for i in range(1000):
        file.write(ChangeRecord(float(i), 0, i, (8, 8), "why"))
    assert len(file.run.changes) + file.dropped == 1000


def test_changes_outlive_rounds(tmp_path):
    file = RunFile(max_bytes=6000)
    file.write(header(2))
    file.open(tmp_path)
    for i in range(600):
        file.write(a_round(i))
        if i % 60 == 0:
            file.write(ChangeRecord(float(i), 0, i, (8, 8), "why"))
    assert len(read(tmp_path).changes) == 10


@pytest.mark.parametrize("reason", ["why", "größer, schneller"])
def test_many_changes_are_bounded_as_well(tmp_path, reason):
    file = RunFile(max_bytes=4000)
    file.write(header(2))
    file.open(tmp_path)
    for i in range(1000):
        file.write(ChangeRecord(float(i), 0, i, (8, 8), reason))
        assert (tmp_path / NAME).stat().st_size <= 4000
    assert read(tmp_path).changes[-1].step == 999


@pytest.mark.parametrize("max_bytes", [10**6, 900])
def test_a_command_whose_bytes_are_no_text_is_recorded(tmp_path, max_bytes):
    """Python reads such bytes of a command line as characters that no file can have."""
    file = RunFile(max_bytes)
    file.write(header(2, command=("train.py", "caf\udce9")))
    file.open(tmp_path)
    for i in range(20):
        file.write(a_round(i))
    assert read(tmp_path).header.command == ("train.py", "caf?")
    assert read(tmp_path).rounds == file.run.rounds


def test_the_last_line_is_always_written(tmp_path):
    file = written(tmp_path, rounds=3, max_bytes=sum(len(as_line(one)) for one in (header(2), *map(a_round, range(3)))))
    file.write(EndRecord(1.0, 0, 3, 3))
    assert read(tmp_path).end is not None
    assert len(read(tmp_path).rounds) == 3


def test_a_file_where_the_folder_should_be_ends_the_file_alone(tmp_path, caplog):
    (tmp_path / "logs").write_text("not a folder")
    file = RunFile()
    file.write(header(2))
    file.open(tmp_path / "logs")
    assert file.path is None
    for i in range(6):
        file.write(a_round(i))
    assert file.path is None
    assert len(file.run.rounds) == 6
    (message,) = caplog.messages
    assert "cannot be written" in message
    assert "Training goes on" in message


def test_a_folder_that_is_gone_when_lines_are_too_many_ends_the_file_alone(tmp_path, caplog):
    """Not even what is left of writing the file anew can be removed then."""
    lines = [header(2), *map(a_round, range(5))]
    file = written(tmp_path / "logs", rounds=4, max_bytes=sum(len(as_line(one)) for one in lines) - 1)
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").write_text("not a folder")
    file.write(a_round(4))
    assert file.path is None
    assert [one.step for one in file.run.rounds] == [0, 2, 4]
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("moment", ["append", "rewrite", "replace"])
def test_a_full_disk_ends_the_file_alone(tmp_path, caplog, monkeypatch, moment):
    """What was written before can be read; the rest is in memory; it is said once."""
    file = written(tmp_path, rounds=4, max_bytes=10**6 if moment == "append" else 1200)
    before = read(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "replace":
        monkeypatch.setattr(run_file.os, "replace", full)
    else:
        monkeypatch.setattr("builtins.open", full)
    for i in range(4, 40):
        file.write(a_round(i))
    monkeypatch.undo()
    assert file.path is None
    assert file.run.rounds[-1].step == 39
    assert len([one for one in caplog.messages if "No space left" in one]) == 1
    after = read(tmp_path)
    assert after.header == before.header
    assert len(after.rounds) >= len(before.rounds) - 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
