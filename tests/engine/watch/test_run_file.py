"""The file of a record: complete, bounded, readable at any moment, and no danger to the run."""

import errno
import math
import shutil
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


def thinned_once(rounds):
    """A file for which the last of some rounds is one too many."""
    lines = [header(2), *rounds]
    file = RunFile(max_bytes=sum(len(as_line(one)) for one in lines) - 1)
    for one in lines:
        file.write(one)
    return file


def test_two_rounds_become_one_with_the_means_over_their_steps():
    busy = ("data", "forward", "backward", "optimizer", "sync")
    once = {name: (0.1 + i, 0.2) for i, name in enumerate(busy)} | {"step_time": 0.4, "link": 0.04}
    again = {name: (0.5 + i, 0.2) for i, name in enumerate(busy)} | {"step_time": 0.8, "link": 0.08}
    mean = {name: (0.4 + i, 0.2) for i, name in enumerate(busy)} | {"step_time": 0.7, "link": 0.07}
    once, again = once | {"predicted": 0.5, "even": 1.2}, again | {"predicted": 0.9, "even": 1.6}
    mean |= {"predicted": 0.8, "even": 1.5}
    part = mean | {"data": (0.1, 0.2), "even": 1.2}  # one round does not know these of the first worker, and at all
    made = [RoundRecord(float(i), 0, 9 * i, (30, 10)[i % 2], 8, (8, 8), kept=f"round {i}", **again) for i in range(9)]
    made[1] = replace(made[1], timed=5, **once)
    made[3] = replace(made[3], **once)
    made[4] = replace(made[4], **again | {"data": (math.nan, 0.2), "even": math.nan})
    made[5] = RoundRecord(5.0, 0, 45, 10, 0, (8, 8))
    made[8] = RoundRecord(8.0, 0, 72, 0, 0, (8, 8), kept="round 8")
    made += [RoundRecord(i, 0, 72, 0, 0, (8, 8), even=i, kept="no step") for i in (9.0, 10.0)]
    file = thinned_once(made)
    first, means, partial, untimed_first, untimed_last, no_step = file.run.rounds
    assert first == made[0]
    assert (means.time, means.step, means.count, means.timed, means.kept) == (2.0, 18, 40, 13, "round 2")
    for name, value in mean.items():
        assert getattr(means, name) == pytest.approx(value), name
    for name, value in part.items():
        assert getattr(partial, name) == pytest.approx(value), name
    assert untimed_first == replace(made[6], count=40)
    assert untimed_last == replace(made[7], time=8.0, step=72, count=10, timed=8, kept="round 8")
    assert no_step == made[10]
    assert file.dropped == 5


def test_the_newest_round_stays_as_it_is_beside_an_odd_one():
    made = [replace(a_round(i), kept=f"round {i}" * 20) for i in range(10)]
    assert [one.step for one in thinned_once(made).run.rounds] == [0, 2, 4, 6, 8, 9]


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ([replace(a_round(i), sizes=(8 + (i > 2) * i, 8), kept="why " * 20) for i in range(9)], [0, 2, 4, 6, 8]),
        (
            [a_round(0), *(ChangeRecord(1.0, 0, i, (8, 8), "why " * 20) for i in range(9)), a_round(9)],
            [0, 4, 5, 6, 7, 8, 9],
        ),
    ],
)
def test_a_file_that_is_full_is_so_no_more_for_a_while(made, kept):
    """One pair of rounds of the same split is not enough, nor are two rounds; of the rest, the older half goes."""
    file = thinned_once(made)
    assert sorted(one.step for one in (*file.run.rounds, *file.run.changes)) == kept
    assert file.dropped == len(made) - len(kept)


@pytest.mark.parametrize("other", [{"sizes": (10, 6)}, {"accumulation": 2}])
def test_rounds_of_two_splits_are_kept_apart_as_long_as_there_is_space(other):
    made = [replace(a_round(i), kept=f"round {i}" * 20) for i in range(11)]
    made = [replace(one, **other) if one.step >= 4 else one for one in made]
    assert [one.step for one in thinned_once(made).run.rounds] == [0, 2, 3, 4, 6, 8, 10]


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
    file = written(tmp_path / "logs", rounds=6)
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
