"""The file of a record: complete, bounded, readable at any moment, and no danger to the run."""

import errno
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import RunFigures
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


def test_a_second_run_follows_the_first(tmp_path):
    written(tmp_path, rounds=2)
    written(tmp_path, rounds=4)
    assert len(read(tmp_path).rounds) == 4
    assert (tmp_path / NAME).read_text().count('"kind":"run"') == 2


def test_a_run_that_was_killed_inside_a_line_does_not_swallow_the_next(tmp_path):
    written(tmp_path, rounds=2)
    whole = (tmp_path / NAME).read_text(encoding="utf-8")
    (tmp_path / NAME).write_text(whole[:-7], encoding="utf-8")
    written(tmp_path, rounds=3)
    assert len(read(tmp_path).rounds) == 3
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


@pytest.mark.parametrize("max_bytes", [30_000, 100_000])
def test_figures_of_a_thinned_run_are_those_of_the_whole(max_bytes):
    """Step times that vary, bursts among them, rounds of different lengths, and some that have timed nothing."""
    whole, thinned, random = RunFile(10**9), RunFile(max_bytes), np.random.default_rng(0)
    for file in (whole, thinned):
        file.write(header(2))
    steps = 0
    for i in range(2000):
        count, step_time = int(random.integers(1, 60)), float(random.lognormal(-2, 0.3)) * (10 if i % 50 == 7 else 1)
        steps += count
        sizes = ((8, 8), (12, 4), (8, 8), (11, 5))[i // 500]
        busy = dict.fromkeys(("data", "forward", "backward", "optimizer"), (step_time / 5, step_time / 6))
        timed = {"step_time": step_time, "even": 1.5 * step_time, "link": step_time / 9, **busy} if i % 7 else {}
        for file in (whole, thinned):
            file.write(RoundRecord(float(i), 0, steps - 1, count, 8 if timed else 0, sizes, **timed))
    a, b = RunFigures(whole.run), RunFigures(thinned.run)
    assert len(b.run.rounds) < len(a.run.rounds) / 4
    assert len(b.run.rounds) + thinned.dropped == 2000
    assert sum(one.count for one in b.run.rounds) == steps
    assert {(one.step, one.sizes) for one in b.run.rounds} <= {(one.step, one.sizes) for one in a.run.rounds}
    for split in ((8, 8), (12, 4), (11, 5)):
        assert sum(one.count for one in b.run.rounds if one.sizes == split) == sum(
            one.count for one in a.run.rounds if one.sizes == split
        )
    for name in ("speed_up", "speed_up_of_run", "step_time", "even", "rate", "idle", "link_share", "share_of_solo"):
        assert getattr(b, name) == pytest.approx(getattr(a, name), rel=0.03), name
    steady = [replace(one, step_time=0.1) for one in a.run.rounds]
    assert RunFigures(replace(a.run, rounds=tuple(steady))).step_time != pytest.approx(a.step_time, rel=0.03)


def test_lines_that_are_dropped_are_counted(tmp_path):
    file = RunFile(max_bytes=4000)
    file.write(header(2))
    for i in range(1000):
        file.write(ChangeRecord(float(i), 0, i, (8, 8), "why"))
    assert len(file.run.changes) + file.dropped == 1000


def test_rounds_that_all_have_another_split_keep_their_steps():
    file = RunFile(max_bytes=4000)
    file.write(header(2))
    for i in range(500):
        file.write(RoundRecord(float(i), 0, i, 1, 1, (8 + i % 2, 8), step_time=1.0))
    assert sum(one.count for one in file.run.rounds) == 500
    assert len(file.run.rounds) < 100
    assert {one.step_time for one in file.run.rounds} == {1.0}


def test_changes_outlive_rounds(tmp_path):
    file = RunFile(max_bytes=6000)
    file.write(header(2))
    file.open(tmp_path)
    for i in range(600):
        file.write(a_round(i))
        if i % 60 == 0:
            file.write(ChangeRecord(float(i), 0, i, (8, 8), "why"))
    assert len(read(tmp_path).changes) == 10


def test_many_changes_are_bounded_as_well(tmp_path):
    file = RunFile(max_bytes=4000)
    file.write(header(2))
    file.open(tmp_path)
    for i in range(1000):
        file.write(ChangeRecord(float(i), 0, i, (8, 8), "why"))
    assert (tmp_path / NAME).stat().st_size <= 4000
    assert read(tmp_path).changes[-1].step == 999


def test_the_last_line_is_always_written(tmp_path):
    file = written(tmp_path, rounds=3, max_bytes=sum(len(as_line(one)) for one in (header(2), *map(a_round, range(3)))))
    file.write(EndRecord(1.0, 0, 3, 3))
    assert read(tmp_path).end is not None


def test_a_file_where_the_folder_should_be_ends_the_file_alone(tmp_path, caplog):
    (tmp_path / "logs").write_text("not a folder")
    file = written(tmp_path / "logs", rounds=6)
    assert file.path is None
    assert len(file.run.rounds) == 6
    (message,) = caplog.messages
    assert "cannot be written" in message
    assert "Training goes on" in message


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
