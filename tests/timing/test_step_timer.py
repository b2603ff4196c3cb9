"""What a step takes, from clocks that are set by hand: every number of a row, and which steps have one."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.comm.timing import step_timer as module
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.step_timer import StepTimer, TimedIterator
from tests.timing.clocks import Hand

NAMES = ("step", "size", "forward", "P", "first", "t_o", "t_u", "step_time", "wait", "update")
TWO = (((2.0, 3.25), (5.0, 6.0)), 7.0)
"""A backward call of 7 seconds with two buckets: ready at 2 and 5, averaged at 3.25 and 6."""
FIRST = SETTINGS.warm_up_steps


class Run:
    """Drives a timer through steps, each a list of parts: ``(name, seconds)``, or what a backward pass is made of."""

    def __init__(self, monkeypatch, **given):
        self.clock = Hand()
        self.timer = StepTimer(self.clock, **given)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=self.clock.mark))

    def batches(self, wait):
        while True:
            self.clock.now += wait
            yield "batch"

    def passage(self, buckets, end, *, ends=True):
        start, numbers = self.clock.now, {}
        self.timer.begin_backward()
        for moment, kind, i in sorted((one[k], k, i) for i, one in enumerate(buckets) for k in range(len(one))):
            self.clock.now = start + moment
            if kind == 0:
                numbers[i] = self.timer.bucket_ready()
            else:
                self.timer.bucket_done(numbers[i])
        self.clock.now = start + end
        if ends:
            self.timer.end_backward()

    def play(self, parts):
        for what, *seconds in parts:
            if what == "work":
                self.clock.now += seconds[0]
            elif what == "backward":
                self.passage(*seconds)
            elif what == "fails":
                self.passage(*seconds, ends=False)
            elif what == "bucket":
                number = self.timer.bucket_ready()
                self.play([("waiting", *seconds)])
                self.timer.bucket_done(number)
            elif what in ("excluded", "waiting"):
                with getattr(self.timer, what)():
                    self.play([("work", s) if isinstance(s, float) else s for s in seconds])
            else:
                getattr(self.timer, what)()

    def micro(self, parts, *, size=4, wait=1.0, regular=True, fetch=True, **more):
        if fetch:
            assert next(TimedIterator(self.batches(wait), self.timer)) == "batch"
        self.timer.begin_step(size, regular=regular, **more)
        self.play(parts)
        return self.timer.end_step()

    def step(self, forward=2.0, update=0.5, passages=(TWO,), metric=0.0, **more):
        passes = [("backward", *one) for one in passages]
        after = [("excluded", metric), ("begin_update",), ("work", update), ("end_update",)]
        return self.micro([("work", forward), *passes, *after], **more)

    def warm(self, **more):
        for _ in range(FIRST):
            self.step(**more)
        return self

    def rows(self):
        table = self.timer.take()
        return [
            {**dict(zip(NAMES, row, strict=False)), "ends": [end for end in row[len(NAMES) :] if not np.isnan(end)]}
            for row in table[~np.isnan(table[:, 0])].tolist()
        ]


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


USUAL = {
    "wait": 1.0,
    "forward": 2.0,
    "update": 0.5,
    "P": 5.0,
    "first": 2.0,
    "t_o": 1.25,
    "t_u": 1.0,
    "ends": [3.25, 6.0],
}
UPDATE = [("begin_update",), ("work", 0.5), ("end_update",)]
CLOSURE = [("begin_update",), ("excluded", 3.0), ("work", 2.0), ("backward", *TWO), ("excluded", 3.0), ("work", 0.5)]
"""As Lightning does: the optimizer's step calls a closure with the forward and the backward pass."""
SHARDED = [
    *(("work", 0.25), ("waiting", 1.0), ("work", 0.5), ("begin_backward",), ("work", 8.0), ("waiting", 2.0)),
    *(("work", 16.0), ("waiting", ("excluded", 4.0)), ("end_backward",)),
]
"""A sharded model waits for parameters in forward and backward, and for gradients at the end."""
USUALLY = ("work", 2.0), ("backward", *TWO)
STEPS = {
    "usual": ([*USUALLY, *UPDATE], {"step_time": 10.5}),
    "a collective": (
        [("work", 2.0), ("excluded", 4.0, ("excluded", 2.0)), ("backward", *TWO), *UPDATE],
        {"step_time": 16.5},
    ),
    "a closure": ([*CLOSURE, ("end_update",), ("work", 0.25)], {"forward": 2.25}),
    "two optimizers": (
        [*USUALLY, *UPDATE, *USUALLY, *UPDATE],
        {"forward": 4.0, "update": 1.0, "P": 10.0},
    ),
    "a bucket behind another": (
        [("work", 2.0), ("backward", ((1.0, 6.0), (3.0, 7.0)), 7.0), *UPDATE],
        {"first": 1.0, "P": 3.0, "t_o": 5.0, "t_u": 1.0, "ends": [6.0, 7.0]},
    ),
    "a last pass that is not synchronized": ([*USUALLY, ("backward", (), 4.0), *UPDATE], {"P": 9.0}),
    "a hook that waits": (
        [
            *(("work", 2.0), ("begin_backward",), ("work", 2.0), ("bucket", 1.25), ("work", 1.75), ("bucket", 1.0)),
            *(("end_backward",), *UPDATE),
        ],
        {"P": 3.75, "t_o": 0.0, "t_u": 2.25, "step_time": 9.5, "ends": [2.0, 6.0]},
    ),
    "a sharded model": (
        [*SHARDED, ("reduced",), *UPDATE],
        {"forward": 0.75, "P": 24.0, "first": 24.0, "t_o": 0.0, "t_u": 7.0, "ends": [31.0]},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_row_by_hand(name, run):
    """Other parts of a step keep their seconds, whatever one of them takes."""
    parts, changes = STEPS[name]
    run.warm()
    assert run.micro(parts)
    (row,) = run.rows()
    expected = {"step": FIRST + 1, "size": 4, **USUAL, **changes}
    assert {key: row[key] for key in expected} == expected
    assert run.rows() == []


def test_an_accumulation_window_is_one_row_with_the_means_of_its_micro_batches(run):
    for _ in range(FIRST + 1):
        assert not run.step(passages=(((), 3.0),))
        assert not run.step(passages=(((), 3.0),), forward=4.0)
        assert run.step()
    (row,) = run.rows()
    assert (row["forward"], row["P"]) == (pytest.approx(8 / 3), pytest.approx(11 / 3))
    assert (row["step"], row["step_time"], row["first"], row["t_o"], row["t_u"]) == (FIRST + 1, 25.5, 2.0, 1.25, 1.0)
    for synced in (False, False, True):
        run.micro([*SHARDED, *([("reduced",)] if synced else [])])
    (row,) = run.rows()
    assert (row["forward"], row["P"], row["first"], row["t_u"]) == (0.75, 24.0, 24.0, 21.0)


def test_a_step_without_a_synchronization_counts_with_the_next(run):
    """A skipped step (no loss) has no backward pass and is no step of the group."""
    run.warm()
    assert not run.step(passages=())
    assert run.timer.synced_steps == FIRST
    run.step()
    (row,) = run.rows()
    assert (row["step"], row["step_time"]) == (FIRST + 1, 3.5 + 10.5)


LEFT_OUT = {
    "the first of another size": ([4, 6, 6], [1, 3]),
    "a ragged tail and the step after it": ([4, (1, False), 4, 4], [1, 4]),
    "one during which a batch failed": ([4, "fails", 4], [1, 3]),
    "one that also evaluated": ([4, "discard", 4], [1, 3]),
    "sizes that vary under one plan": ([(4, True), (5, True, 4), (6, True, 4)], [1, 2, 3]),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_steps_whose_times_predict_nothing_have_no_row(name, run):
    steps, kept = LEFT_OUT[name]
    assert run.warm().rows() == []
    for step in steps:
        if step == "fails":
            run.micro([("work", 2.0), ("fails", ((1.0,),), 1.0)])
        elif step == "discard":
            run.micro([("work", 2.0), ("discard",), ("backward", *TWO)])
        else:
            size, regular, *planned = step if isinstance(step, tuple) else (step, True)
            run.step(size=size, regular=regular, **({"planned": planned[0]} if planned else {}))
    assert [row["step"] - FIRST for row in run.rows()] == kept


def test_what_runs_between_two_steps_is_part_of_neither(run):
    """A sync round, a validation: the time from step to step is unknown, and the rest is not."""
    run.warm().step()
    for between in (run.timer.interrupt, run.timer.discard):
        between()
        run.clock.now += 100.0
        run.step()
        run.step()
    rows = run.rows()
    np.testing.assert_array_equal([row["step_time"] for row in rows], [10.5, np.nan, 10.5, np.nan, 10.5])
    assert {(row["wait"], row["forward"], row["P"], row["update"]) for row in rows} == {(1.0, 2.0, 5.0, 0.5)}


def test_a_batch_that_nobody_fetched_begins_where_its_step_does(run):
    """A loop may run a batch twice, or one that it made itself: what was waited for is of the step before."""
    run.warm().step()
    run.step(fetch=False)
    before, after = run.rows()
    assert (before["wait"], after["wait"], after["forward"]) == (1.0, 0.0, 2.0)


@pytest.mark.parametrize("late", [1.0 + 2.0 + 6.0, 1.0 + 2.0 + 7.0 + 0.5], ids=["bucket", "optimizer"])
def test_a_row_waits_until_the_device_has_reached_all_its_marks(late, run):
    """Nothing ever waits for the device: ``Hand`` refuses to. Marks of other streams may come later than the last."""
    run.warm()
    start = run.clock.now
    run.clock.late.add(start + late)
    run.step()
    assert run.rows() == []
    run.clock.late.clear()
    run.clock.reached = reached = run.clock.now
    run.step()
    assert [row["step"] for row in run.rows()] == [FIRST + 1]
    run.clock.reached = reached + 3.0
    assert run.rows() == []
    run.clock.reached = float("inf")
    assert [row["step"] for row in run.rows()] == [FIRST + 2]


@pytest.mark.parametrize(("cores", "slower"), [(0.5, (22 / 7, 2.0)), (5.0, (1.0, 1.0))])
def test_under_a_quota_times_are_those_that_it_sustains(cores, slower, monkeypatch):
    """10.5 seconds of processor time in a step, 5 of them in backward: at half a core they take 21 to come back."""
    run = Run(monkeypatch, cores=cores, processor_time=lambda: run.clock.now)
    for size in (4, 8):
        run.warm(size=size)
        for _ in range(2):
            run.clock.now += 100.0  # what is no step uses none of it: agreement, validation
            run.timer.interrupt()
            run.step(size=size)
    rows = run.rows()
    assert {row["size"] for row in rows} == {4, 8}
    for row in rows:
        for name in ("wait", "forward", "update"):
            assert row[name] == pytest.approx(USUAL[name] * slower[0])
        assert (row["P"], row["first"]) == (pytest.approx(5.0 * slower[1]), pytest.approx(2.0 * slower[1]))


# rounds


def test_settings_say_how_many_steps_are_left_out_and_kept(monkeypatch):
    for first, kept in ((0, 4), (5, 7)):
        run = Run(monkeypatch, settings=replace(SETTINGS, warm_up_steps=first, max_steps=kept))
        for _ in range(10):
            run.step()
        table = run.timer.take()
        steps = list(range(max(first, 10 - kept) + 1, 11))
        assert table.shape == (kept, len(NAMES) + 2)
        assert table[-len(steps) :, 0].tolist() == steps
    assert SETTINGS.of(4000).max_steps == 16, "the more ranks, the fewer steps of each"


def test_rows_that_another_rank_lacks_come_again(run):
    """Its device reported them later; once, together with what came meanwhile, and the oldest go first."""

    def round_with(steps):
        """A sync round in which the other rank has only these steps."""
        mine = run.timer.pack().reshape(SETTINGS.max_steps, -1)
        other = np.where(np.isin(mine[:, :1], steps), mine, np.nan)
        run.timer.unpack(np.stack([mine.ravel(), other.ravel()]), None)
        return mine[~np.isnan(mine[:, 0]), 0].tolist(), run.timer.matched

    run.warm()
    for _ in range(3):
        run.step()
    sent, matched = round_with([4])
    assert (sent, matched.num_steps) == ([4, 5, 6], 1)
    np.testing.assert_array_equal(matched.forward, [[2.0, 2.0]])
    run.step()
    assert round_with([5, 7])[0] == [5, 6, 7]
    for _ in range(SETTINGS.max_steps + 2):
        run.step()
    assert round_with([])[0] == list(range(10, 10 + SETTINGS.max_steps))


def test_work_stands_behind_the_buckets(run):
    run.warm().timer.measure_work(2)
    run.step(passages=((((2.0, 3.0),), 4.0),), work=(2.0, 4.0))
    (row,) = [row for row in run.timer.take() if not np.isnan(row[0])]
    np.testing.assert_array_equal(row[-4:], [3.0, np.nan, 2.0, 4.0])


# what a change of size costs


def test_what_a_change_of_size_costs_is_seen_from_the_first_step_after_it(run):
    """A kernel that is compiled or tuned anew; loading and agreements do not count, a whole window does."""
    costs = []
    first, second = [(6, 1.0), (6, 5.0)], [(7, 31.0), (7, 1.0)]
    again, third = [(6, 9.0)], [(5, 99.0), (4, 22.0), (4, 1.0)]
    for size, seconds in [(8, 1.0), *first, *second, *again, *third]:
        run.clock.now += 100.0  # between steps
        run.micro([("work", 0.75 * seconds)], size=size)
        run.micro([("work", 0.25 * seconds), ("backward", ((0.0, 0.0),), 0.0)], size=size, fetch=False)
        costs.append(run.timer.change_cost)
    assert costs == [None] * 4 + [0.0] * 4 + [21.0], "the lower of the last two of sizes that did not run before"
