"""The file of a record: complete, bounded, readable at any moment, and no danger to the run."""

import errno
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.records import FILE_NAME, ChangeRecord, EndRecord, RoundRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.engine.watch.run_file import RunFile
from tests.recorded import header


def a_round(i, **more):
    return RoundRecord(float(i), 0, i, 1, 1, (8, 8), **{"kept": f"round {i}", **more})


def read(folder):
    return RunRecord.from_lines((folder / FILE_NAME).read_text(encoding="utf-8").splitlines())


def written(folder, rounds=3, **settings):
    """A file whose folder is known in the middle of the run."""
    file = RunFile(**settings)
    file.write(header(2))
    for i in range(rounds):
        if i == rounds // 2:
            file.open(folder)
        file.write(a_round(i))
    return file


def test_lines_before_and_after_the_folder_is_known_are_in_the_file(tmp_path):
    file = written(tmp_path / "a" / "b", rounds=5)
    assert file.path == tmp_path / "a" / "b" / FILE_NAME
    assert [one.step for one in read(file.path.parent).rounds] == [0, 1, 2, 3, 4]
    assert file.run == read(file.path.parent)
    file.open(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "a file has one place"
    alone = RunFile()
    assert not alone.has_header
    alone.write(header(2))
    alone.write(a_round(1))
    assert (alone.has_header, len(alone.run.rounds), alone.path) == (True, 1, None)


@pytest.mark.parametrize("cut", [0, 1, 7])
@pytest.mark.parametrize(("max_bytes", "rounds"), [(10**6, 3), (900, 20)])
def test_a_second_run_follows_the_first_also_one_that_was_killed_inside_a_line(tmp_path, cut, max_bytes, rounds):
    written(tmp_path, rounds=2)
    whole = (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    (tmp_path / FILE_NAME).write_text(whole[: len(whole) - cut], encoding="utf-8")
    file = written(tmp_path, rounds=rounds, max_bytes=max_bytes)
    assert read(tmp_path) == file.run
    assert len(file.run.rounds) + file.dropped == rounds
    assert (tmp_path / FILE_NAME).read_text(encoding="utf-8").count('{"kind":"run"') == 2


@pytest.mark.parametrize("earlier", [0, 3])
def test_its_size_is_bounded_and_its_ends_stay(tmp_path, earlier):
    if earlier:
        written(tmp_path, rounds=earlier)
    before = (tmp_path / FILE_NAME).stat().st_size if earlier else 0
    file = written(tmp_path, rounds=1000, max_bytes=4000)
    assert (tmp_path / FILE_NAME).stat().st_size - before <= 4000
    found = read(tmp_path)
    assert found == file.run
    assert (found.rounds[0].step, found.rounds[-1].step) == (0, 999)
    assert len(found.rounds) + file.dropped == 1000
    assert len(found.rounds) > 10
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    file.write(EndRecord(1.0, 0, 3, 3))
    assert read(tmp_path).end is not None, "the last line is always written"


@pytest.mark.parametrize("reason", ["why", "größer, schneller"])
def test_changes_outlive_rounds_and_are_bounded_as_well(tmp_path, reason):
    file = RunFile(max_bytes=6000)
    file.write(header(2))
    file.open(tmp_path)
    for i in range(600):
        file.write(a_round(i))
        if i % 60 == 0:
            file.write(ChangeRecord(float(i), 0, i, (8, 8), reason))
    assert len(read(tmp_path).changes) == 10
    for i in range(1000):
        file.write(ChangeRecord(float(i), 0, i, (8, 8), reason))
        assert (tmp_path / FILE_NAME).stat().st_size <= 6000
    assert read(tmp_path).changes[-1].step == 999


@pytest.mark.parametrize("moment", ["append", "rewrite", "no folder"])
def test_a_disk_that_fails_ends_the_file_alone(tmp_path, caplog, monkeypatch, moment):
    """What was written before can be read; the rest is in memory; it is said once."""
    folder = tmp_path / "logs"
    if moment == "no folder":
        folder.write_text("not a folder")
    file = written(folder, rounds=4, max_bytes=1200 if moment == "rewrite" else 10**6)
    before = None if moment == "no folder" else read(folder)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment != "no folder":
        monkeypatch.setattr("builtins.open", full)
    for i in range(4, 40):
        file.write(a_round(i))
    monkeypatch.undo()
    assert file.path is None
    assert file.run.rounds[-1].step == 39
    assert len(caplog.messages) == 1
    if moment != "no folder":
        after = read(folder)
        assert after.header == before.header
        assert len(after.rounds) >= len(before.rounds) - 1
        assert [path.name for path in folder.iterdir()] == [FILE_NAME]


# where lines are too many, rounds are merged, with the figures of the whole


@pytest.mark.parametrize("max_bytes", [30_000, 100_000])
def test_figures_of_a_thinned_run_are_those_of_the_whole(max_bytes, seed):
    """Step times that vary, bursts among them, rounds of different lengths, and some that have timed nothing."""
    whole, thinned, chance = RunFile(10**9), RunFile(max_bytes), np.random.default_rng(seed)
    for file in (whole, thinned):
        file.write(header(2))
    steps = 0
    for i in range(2000):
        count, step_time = int(chance.integers(1, 60)), float(chance.lognormal(-2, 0.3)) * (10 if i % 50 == 7 else 1)
        steps += count
        sizes = ((8, 8), (12, 4), (8, 8), (11, 5))[i // 500]
        busy = dict.fromkeys(("data", "forward", "backward", "optimizer"), (step_time / 5, step_time / 6))
        timed = {"step_time": step_time, "even": 1.5 * step_time, "link": step_time / 9, **busy} if i % 7 else {}
        for file in (whole, thinned):
            file.write(RoundRecord(float(i), 0, steps - 1, count, 8 if timed else 0, sizes, **timed))
    a, b = RunFigures(whole.run), RunFigures(thinned.run)
    assert len(b.run.rounds) < len(a.run.rounds) / 4
    assert len(b.run.rounds) + thinned.dropped == 2000
    for split in ((8, 8), (12, 4), (11, 5)):
        counts = [sum(one.count for one in figures.run.rounds if one.sizes == split) for figures in (a, b)]
        assert counts[0] == counts[1]
    for name in ("speed_up", "speed_up_of_run", "step_time", "even", "rate", "idle", "link_share", "share_of_solo"):
        assert getattr(b, name) == pytest.approx(getattr(a, name), rel=0.05), name
    steady = [replace(one, step_time=0.1) for one in a.run.rounds]
    assert RunFigures(replace(a.run, rounds=tuple(steady))).step_time != pytest.approx(a.step_time, rel=0.05)
