"""Where the lines of a record are too many, rounds are merged, with the figures of the whole."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.records import ChangeRecord, RoundRecord
from lightning_hetero.engine.watch.run_file import RunFile
from tests.recorded import header


def a_round(i):
    return RoundRecord(float(i), 0, i, 1, 1, (8, 8), kept=f"round {i}")


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
    again |= {"jitter": (0.1, 0.2), "nodes": ((0.1, 0.2, 0.3, 0.4),) * 2, "gamma": 0.5, "t_o": 0.1, "t_u": 0.01}
    again |= {"error": 0.03, "sample": (((1.0, 2.0), (3.0, 4.0)),)}
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


LONG = [ChangeRecord(1.0, 0, i, (8, 8), "why " * 20) for i in range(1, 10)]


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ([replace(a_round(i), sizes=(8 + (i > 2) * i, 8), kept="why " * 20) for i in range(9)], [0, 2, 4, 6, 8]),
        ([a_round(0), *LONG, a_round(10)], [0, 5, 6, 7, 8, 9, 10]),
        ([a_round(0), *LONG, a_round(10), a_round(11)], [0, 5, 6, 7, 8, 9, 11]),
    ],
)
def test_a_file_that_is_full_is_so_no_more_for_a_while(made, kept):
    """Rounds of two splits are merged where those of one do not suffice; then the older half of all else goes."""
    file = thinned_once(made)
    assert sorted(one.step for one in (*file.run.rounds, *file.run.changes)) == kept
    assert file.dropped == len(made) - len(kept)


@pytest.mark.parametrize("other", [{"sizes": (10, 6)}, {"accumulation": 2}])
def test_rounds_of_two_splits_are_kept_apart_as_long_as_there_is_space(other):
    made = [replace(a_round(i), kept=f"round {i}" * 20) for i in range(11)]
    made = [replace(one, **other) if one.step >= 4 else one for one in made]
    assert [one.step for one in thinned_once(made).run.rounds] == [0, 2, 3, 4, 6, 8, 10]


def test_rounds_that_all_have_another_split_keep_their_steps():
    file = RunFile(max_bytes=4000)
    file.write(header(2))
    for i in range(500):
        file.write(RoundRecord(float(i), 0, i, 1, 1, (8 + i % 2, 8), step_time=1.0 + i % 2))
    assert sum(one.count for one in file.run.rounds) == 500
    assert len(file.run.rounds) < 100
    assert all(one.step_time == one.sizes[0] - 7 for one in file.run.rounds), "the times are those of the split"
