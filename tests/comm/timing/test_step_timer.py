"""Timings of a step from scripted clocks: every number by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from lightning_hetero.comm.timing import step_rows
from lightning_hetero.comm.timing import step_timer as module
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.step_timer import StepTimer

NAMES = ("step", "size", "forward", "P", "first", "t_o", "t_u", "step_time", "wait", "update")


STEP = (((2.0, 3.25), (5.0, 6.0)), 7.0)
"""Two buckets: ready at 2 and 5, averaged at 3.25 and 6; a backward call of 7 seconds."""


class Script:
    """A clock that is told the time; marks become ready when ``reached`` passes them, as CUDA events do."""

    def __init__(self):
        self.now, self.reached = 0.0, float("inf")

    def mark(self):
        return self.now

    def ready(self, mark):
        return mark <= self.reached

    def seconds(self, start, end):
        assert max(start, end) <= self.reached, "reading this mark would wait for the device"
        return end - start

    def wait(self):
        self.reached = float("inf")

    def perf_counter(self):
        return self.now


class Run:
    """Drives an observer through steps whose moments are given in seconds from the start of each part."""

    def __init__(self, monkeypatch, **kwargs):
        self.clock = Script()
        self.observer = StepTimer(self.clock, **kwargs)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=self.clock.perf_counter))

    def batches(self, wait):
        while True:
            self.clock.now += wait
            yield "batch"

    def passage(self, buckets, end):
        """One backward pass: ``buckets`` are ``(ready, done)`` and ``end`` is when the call returns."""
        start = self.clock.now
        events = [(moment[k], k, i) for i, moment in enumerate(buckets) for k in (0, 1)]
        self.observer.begin_backward()
        numbers = {}
        for moment, kind, i in sorted(events):
            self.clock.now = start + moment
            if kind == 0:
                numbers[i] = self.observer.bucket_ready()
            else:
                self.observer.bucket_done(numbers[i])
        self.clock.now = start + end
        self.observer.end_backward()

    def micro(
        self, size=4, wait=1.0, forward=2.0, passages=(((), 3.0),), update=0.5, metric=0.0, regular=True, fetch=True
    ):
        if fetch:
            assert self.observer.fetch(self.batches(wait)) == "batch"
        self.observer.begin_step(size, regular=regular)
        self.clock.now += forward
        for buckets, end in passages:
            self.passage(buckets, end)
        if metric:
            with self.observer.excluded():
                self.clock.now += metric
        self.observer.begin_update()
        self.clock.now += update
        self.observer.end_update()
        self.observer.end_step()

    def step(self, **kwargs):
        self.micro(**{"passages": (STEP,), **kwargs})

    def warm(self, **kwargs):
        for _ in range(SETTINGS.warm_up_steps):
            self.step(**kwargs)
        return self

    def rows(self):
        table = self.observer.take()
        return [
            {
                **dict(zip(NAMES, row, strict=False)),
                "a": row[2] + row[8] + row[9],
                "ends": [end for end in row[len(NAMES) :] if not np.isnan(end)],
            }
            for row in table[~np.isnan(table[:, 0])].tolist()
        ]


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_a_row_by_hand(run):
    """a = wait 1 + forward 2 + update 0.5; P to the last ready; t_o and t_u of the two buckets; 10.5 s a step."""
    run.warm().step()
    (row,) = run.rows()
    assert row == {
        **{"step": 4, "size": 4, "wait": 1.0, "forward": 2.0, "update": 0.5, "a": 3.5, "P": 5.0},
        **{"first": 2.0, "ends": [3.25, 6.0], "t_o": 1.25, "t_u": 1.0, "step_time": 10.5},
    }
    assert run.rows() == []


@pytest.mark.parametrize(
    ("slower", "field"), [("wait", "wait"), ("forward", "forward"), ("update", "update"), ("metric", None)]
)
def test_what_takes_longer_raises_its_own_field_only(run, slower, field):
    run.warm().step()
    usual = {"wait": 1.0, "forward": 2.0, "update": 0.5, "metric": 0.0}
    run.step(**{slower: usual[slower] + 7.0})
    before, after = run.rows()
    for name in ("wait", "forward", "update", "P", "first", "ends"):
        more = 7.0 if name == field else 0.0
        assert after[name] == (before[name] if name == "ends" else before[name] + more)


def _closure_step(run, forward=2.0, update=0.5, metric=0.0, passages=(STEP,)):
    """As Lightning does: the optimizer's step calls a closure with the forward and the backward pass."""
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    run.observer.begin_update()
    with run.observer.excluded():
        run.clock.now += metric
    run.clock.now += forward
    for buckets, end in passages:
        run.passage(buckets, end)
    with run.observer.excluded():
        run.clock.now += metric
    run.clock.now += update
    run.observer.end_update()
    run.clock.now += 0.25  # the rest of the loop
    run.observer.end_step()


@pytest.mark.parametrize("metric", [0.0, 3.0])
def test_an_optimizer_counts_from_the_end_of_the_passes_in_its_closure(run, metric):
    """What is waited in the closure is no forward, what is waited after it no optimizer."""
    run.warm()
    _closure_step(run, metric=metric)
    (row,) = run.rows()
    assert (row["wait"], row["forward"], row["update"], row["P"]) == (1.0, 2.25, 0.5, 5.0)


def test_steps_of_several_optimizers_add_up(run):
    """As two networks in turn: forward, backward, update of each."""
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    for update in (0.5, 0.75):
        run.clock.now += 2.0
        run.passage(*STEP)
        run.observer.begin_update()
        run.clock.now += update
        run.observer.end_update()
    run.observer.end_step()
    (row,) = run.rows()
    assert (row["forward"], row["update"], row["P"], row["ends"]) == (4.0, 1.25, 10.0, [3.25, 6.0])


def test_an_optimizer_that_failed_has_no_end(run):
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    run.passage(*STEP)
    run.observer.begin_update()  # an error that the user's loop catches
    run.clock.now += 4.0
    run.observer.end_step()
    run.step()
    first, second = run.rows()
    assert (first["forward"], first["update"]) == (4.0, 0.0)
    assert (second["forward"], second["update"]) == (2.0, 0.5)


def test_an_optimizer_that_calls_another_has_one_end(run):
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    run.passage(*STEP)
    run.observer.begin_update()
    run.observer.begin_update()
    run.clock.now += 0.5
    run.observer.end_update()
    run.observer.end_update()
    run.observer.end_step()
    assert run.rows()[0]["update"] == 0.5


def test_steps_of_different_numbers_of_buckets_lie_in_one_table(run):
    """The places of the buckets that a step did not have stay empty."""
    one = (((2.0, 3.0),), 4.0)
    run.warm().step(passages=(one,))
    assert run.observer.take().shape == (SETTINGS.max_steps, len(NAMES) + 2)
    run.step()
    run.step(passages=(one,))
    assert [row["ends"] for row in run.rows()] == [[3.25, 6.0], [3.0]]


def test_a_bucket_waits_for_the_one_before_it(run):
    """Bucket 1 is ready at 3 but the link is busy until 6: of its synchronisation only the second from 6 counts."""
    run.warm().step(passages=((((1.0, 6.0), (3.0, 7.0)), 7.0),))
    (row,) = run.rows()
    assert (row["first"], row["P"], row["t_o"], row["t_u"]) == (1.0, 3.0, 5.0, 1.0)


def test_three_buckets_two_of_them_overlap(run):
    run.warm().step(passages=((((1.0, 2.0), (2.5, 3.0), (4.0, 6.0)), 6.0),))
    (row,) = run.rows()
    assert (row["t_o"], row["t_u"]) == (1.5, 2.0)


def test_bucket_without_an_end_is_done_when_backward_returns(run):
    """One bucket, averaged by a hook that does not report."""
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    start = run.clock.now
    run.observer.begin_backward()
    run.clock.now = start + 2.0
    run.observer.bucket_ready()
    run.clock.now = start + 5.0
    run.observer.end_backward()
    run.observer.end_step()
    (row,) = run.rows()
    assert (row["P"], row["t_o"], row["t_u"]) == (2.0, 0.0, 3.0)


def test_excluded_collectives_are_no_computing(run):
    run.warm(metric=4.0).step(metric=4.0)
    (row,) = run.rows()
    assert (row["a"], row["step_time"]) == (3.5, 14.5)


def _sharded(run, waits=(1.0, 2.0, 4.0), synced=True):
    """A micro-batch of a sharded model: waits for parameters in forward and backward, and for gradients at the end."""
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    run.clock.now += 0.25
    with run.observer.waiting():
        run.clock.now += waits[0]
    run.clock.now += 0.5
    run.observer.begin_backward()
    for computes, waits_for in ((8.0, waits[1]), (16.0, waits[2])):
        run.clock.now += computes
        with run.observer.waiting(), run.observer.excluded():
            run.clock.now += waits_for
    run.observer.end_backward()
    if synced:
        run.observer.reduced()
    run.observer.end_step()


@pytest.mark.parametrize("waits", [(1.0, 2.0, 4.0), (0.0, 0.0, 0.0), (32.0, 0.0, 64.0)])
def test_what_a_sharded_model_waits_for_is_synchronization(run, waits):
    """A fast worker waits for parameters of slow ones before each layer: that is no computing of its own."""
    run.warm()
    _sharded(run, waits)
    (row,) = run.rows()
    assert (row["forward"], row["P"], row["first"], row["t_o"]) == (0.75, 24.0, 24.0, 0.0)
    assert row["t_u"] == sum(waits)
    assert run.observer.synced_steps == SETTINGS.warm_up_steps + 1


def test_what_a_hook_waits_for_inside_a_bucket_is_synchronization(run):
    """Computes for 2 s and 1.75 s, and waits for each bucket where it is complete: 1.25 s and 1 s."""
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    run.observer.begin_backward()
    for computes, waits_for in ((2.0, 1.25), (1.75, 1.0)):
        run.clock.now += computes
        number = run.observer.bucket_ready()
        with run.observer.waiting():
            run.clock.now += waits_for
        run.observer.bucket_done(number)
    run.observer.end_backward()
    run.observer.end_step()
    (row,) = run.rows()
    assert (row["P"], row["first"], row["t_o"], row["t_u"]) == (3.75, 2.0, 0.0, 2.25)
    assert row["ends"] == [2.0, 6.0]


def test_waits_of_all_micro_batches_belong_to_the_step_of_a_sharded_model(run):
    run.warm()
    for synced in (False, False, True):
        _sharded(run, synced=synced)
    (row,) = run.rows()
    assert (row["forward"], row["P"], row["first"], row["t_u"]) == (0.75, 24.0, 24.0, 21.0)
    assert run.observer.synced_steps == SETTINGS.warm_up_steps + 1


def test_a_reduction_needs_a_backward_pass_that_has_ended(run):
    run.observer.reduced()
    run.observer.begin_step(4, regular=True)
    run.observer.reduced()
    run.observer.begin_backward()
    run.observer.reduced()
    assert not run.observer.end_step()


def _ends_after(run, seconds):
    run.clock.now += seconds
    yield from ()


def test_what_is_excluded_inside_of_what_is_counts_once(run):
    """As a gathering that begins with a barrier; and also if it ends in an error that the loop catches."""
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    with run.observer.excluded():
        run.clock.now += 1.0
        with run.observer.excluded():
            run.clock.now += 2.0
    data = _ends_after(run, 4.0)
    with pytest.raises(StopIteration), run.observer.excluded():
        next(data)
    run.clock.now += 0.25
    run.passage(*STEP)
    run.observer.end_step()
    assert run.rows()[0]["forward"] == 0.25


def test_a_backward_pass_that_failed_gives_no_row(run):
    """As one that ran out of memory, in a loop that goes on with the next batch."""
    run.warm()
    run.observer.fetch(run.batches(1.0))
    run.observer.begin_step(4, regular=True)
    run.observer.begin_backward()
    run.observer.bucket_ready()
    run.clock.now += 1.0
    run.observer.end_step()
    run.step()
    assert [row["step"] for row in run.rows()] == [SETTINGS.warm_up_steps + 2]


def test_a_backward_pass_that_goes_on_after_a_failure_has_the_buckets_of_both_attempts(run):
    """Else ranks would disagree on the number of buckets, and with it on the length of a sync round's message."""
    run.observer.begin_step(4, regular=True)
    for _ in range(2):
        run.observer.begin_backward()
        run.observer.bucket_done(run.observer.bucket_ready())
    run.observer.end_backward()
    run.observer.end_step()
    assert run.observer.buckets == 2


def test_a_loader_that_is_not_timed_starts_the_step_at_its_batch(run):
    run.warm(fetch=False)
    run.step(fetch=False)
    assert run.rows()[0]["a"] == 2.5


def test_a_batch_that_nobody_fetched_does_not_begin_with_an_earlier_fetch(run):
    """A loop may run a batch twice, or one that it made itself: what was waited for is of the step before."""
    run.warm().step()
    run.step(fetch=False)
    before, after = run.rows()
    assert (before["wait"], before["a"]) == (1.0, 3.5)
    assert (after["wait"], after["forward"], after["a"]) == (0.0, 2.0, 2.5)


def test_several_backward_passes_of_one_step(run):
    """What lies between them is computing; the network's times are those of the last."""
    run.warm().step(passages=((((1.0, 3.0),), 3.0), STEP))
    (row,) = run.rows()
    assert (row["a"], row["P"], row["first"], row["t_o"], row["t_u"]) == (3.5, 6.0, 2.0, 1.25, 1.0)


def test_backward_pass_that_is_not_synchronised_may_be_the_last(run):
    """As under ``no_sync`` in manual optimization."""
    run.warm().step(passages=(STEP, ((), 4.0)))
    (row,) = run.rows()
    assert (row["a"], row["P"], row["t_o"], row["t_u"]) == (3.5, 9.0, 1.25, 1.0)


def test_accumulation_window_is_one_row_with_the_mean_of_its_micro_batches(run):
    for _ in range(SETTINGS.warm_up_steps + 1):
        run.micro()
        run.micro(forward=4.0)
        run.step()
    (row,) = run.rows()
    assert row["a"] == pytest.approx((3.5 + 5.5 + 3.5) / 3)
    assert row["P"] == pytest.approx((3.0 + 3.0 + 5.0) / 3)
    assert row["step_time"] == 6.5 + 8.5 + 10.5
    assert (row["step"], row["first"], row["t_o"], row["t_u"]) == (4, 2.0, 1.25, 1.0)


def test_accumulation_window_of_different_sizes_gives_no_row(run):
    run.warm()
    run.micro(size=4)
    run.step(size=6)
    assert run.rows() == []
    run.step(size=6)
    assert [row["size"] for row in run.rows()] == [6]


def test_warm_up_rows_are_dropped(run):
    assert run.warm().rows() == []
    run.step()
    assert len(run.rows()) == 1


def test_first_step_of_another_size_is_dropped(run):
    run.warm()
    for size in (4, 6, 6, 4, 4):
        run.step(size=size)
    assert [(row["step"], row["size"]) for row in run.rows()] == [(4, 4), (6, 6), (8, 4)]


def test_ragged_tail_and_the_step_after_it_give_no_row(run):
    run.warm().step()
    run.step(size=1, regular=False)
    run.step()
    run.step()
    assert [row["step"] for row in run.rows()] == [4, 7]


def test_irregular_step_of_the_same_size_gives_no_row(run):
    run.warm().step(regular=False)
    run.step()
    assert [row["step"] for row in run.rows()] == [5]


def test_an_irregular_batch_leaves_out_its_whole_window(run):
    run.warm().micro(regular=False)
    run.step()
    run.step()
    assert [row["step"] for row in run.rows()] == [5]


def test_step_without_a_synchronisation_counts_with_the_next(run):
    """A skipped step (no loss) has no backward pass and is no step of the group."""
    run.warm().micro(passages=())
    assert run.observer.synced_steps == SETTINGS.warm_up_steps
    run.step()
    (row,) = run.rows()
    assert row["step"] == 4
    assert row["step_time"] == 3.5 + 10.5


def test_interrupted_step_time_is_unknown_and_the_rest_is_not(run):
    run.warm().step()
    run.observer.interrupt()
    run.clock.now += 100.0
    run.step()
    run.step()
    rows = run.rows()
    assert [row["a"] for row in rows] == [3.5] * 3
    np.testing.assert_array_equal([row["step_time"] for row in rows], [10.5, np.nan, 10.5])


def test_an_evaluation_between_two_steps_is_part_of_neither(run):
    run.warm().step()
    run.observer.discard()
    run.clock.now += 100.0
    run.step()
    np.testing.assert_array_equal([row["step_time"] for row in run.rows()], [10.5, np.nan])


def test_marks_that_become_ready_later_give_their_rows_later(run):
    """``Script.seconds`` refuses marks that the device has not reached: nothing ever waits."""
    run.warm()
    run.clock.reached = run.clock.now
    run.step()
    reached = run.clock.now
    run.step()
    assert run.rows() == []
    run.clock.reached = reached
    assert [row["step"] for row in run.rows()] == [4]
    run.clock.reached = reached + 3.0
    assert run.rows() == []
    run.clock.reached = float("inf")
    assert [row["step"] for row in run.rows()] == [5]


def test_a_mark_of_a_bucket_holds_its_row_back(run):
    """Bucket marks lie on another stream, which may be behind the one that computes."""
    run.warm()
    run.clock.ready = lambda mark: mark != start + 1.0 + 2.0 + 6.0
    start = run.clock.now
    run.step()
    assert run.rows() == []
    run.clock.ready = lambda mark: True
    assert len(run.rows()) == 1


def test_a_mark_of_an_optimizer_holds_its_row_back(run):
    """As does that of one that runs on a stream of its own."""
    run.warm()
    start = run.clock.now
    run.clock.ready = lambda mark: mark != start + 1.0 + 2.0 + 7.0 + 0.5
    _closure_step(run)
    assert run.rows() == []
    run.clock.ready = lambda mark: True
    assert len(run.rows()) == 1


def test_only_the_newest_rows_are_kept(run):
    run.warm()
    for _ in range(SETTINGS.max_steps + 5):
        run.step()
    table = run.observer.take()
    assert table.shape == (SETTINGS.max_steps, len(NAMES) + 2)
    np.testing.assert_array_equal(table[:, 0], np.arange(9, 9 + SETTINGS.max_steps))


def test_rows_that_another_rank_lacks_come_again(run):
    """Once, and together with what came meanwhile; the oldest go where there are too many."""
    run.warm()
    for _ in range(3):
        run.step()
    assert [row["step"] for row in run.rows()] == [4, 5, 6]
    run.observer._rows.put_back(4)
    run.step()
    assert [row["step"] for row in run.rows()] == [5, 6, 7]
    run.observer._rows.put_back(7)
    assert run.rows() == []
    for _ in range(SETTINGS.max_steps + 2):
        run.step()
    run.rows()
    run.observer._rows.put_back(0)
    run.step()
    assert [row["step"] for row in run.rows()] == list(range(11, 11 + SETTINGS.max_steps))


def test_rows_are_made_when_somebody_asks_for_them(run, monkeypatch):
    """A step pays for its marks alone, however many of them pass before ranks compare what they saw."""
    made = []
    monkeypatch.setattr(
        step_rows, "row_of", lambda *step, whole=step_rows.row_of: made.append(whole(*step)) or made[-1]
    )
    run.warm()
    for _ in range(SETTINGS.max_steps + 5):
        run.step()
    assert made == []
    assert len(run.rows()) == len(made) == SETTINGS.max_steps


def test_seams_outside_a_step_do_nothing(run):
    observer = run.observer
    observer.begin_backward()
    assert observer.bucket_ready() is None
    observer.end_backward()
    observer.begin_update()
    observer.end_update()
    observer.bucket_done(None)
    with observer.excluded():
        pass
    observer.end_step()
    assert observer.synced_steps == 0
    assert run.rows() == []


def test_end_of_data_is_passed_on(run):
    with pytest.raises(StopIteration):
        run.observer.fetch(iter(()))


@pytest.mark.parametrize(("cores", "a", "backward", "first"), [(0.5, 11.0, 10.0, 4.0), (5.0, 3.5, 5.0, 2.0)])
def test_under_a_quota_times_are_those_that_it_sustains(monkeypatch, cores, a, backward, first):
    """10.5 seconds of processor time in a step, 5 of them in backward: at half a core they take 21 to come back."""
    run = Run(monkeypatch, cores=cores, processor_time=lambda: run.clock.now)
    for size in (4, 8):
        run.warm(size=size).step(size=size)
    rows = run.rows()
    assert {row["size"] for row in rows} == {4, 8}
    assert {(row["a"], row["P"], row["first"]) for row in rows} == {(a, backward, first)}
    assert {(row["wait"] / a, row["forward"] / a, row["update"] / a) for row in rows} == {(2 / 7, 4 / 7, 1 / 7)}


def test_what_is_no_step_uses_none_of_the_quota(monkeypatch):
    run = Run(monkeypatch, cores=0.5, processor_time=lambda: run.clock.now)
    run.warm().step()
    run.clock.now += 100.0  # agreement, validation
    run.observer.interrupt()
    run.step()
    assert {row["a"] for row in run.rows()} == {11.0}


def _observer(monkeypatch, steps):
    """What an observer takes a change to cost after each of these ``(size, seconds)``, and the observer."""
    now, costs, observer = [0.0], [], StepTimer(HostClock())
    monkeypatch.setattr("lightning_hetero.comm.timing.step_timer.time.perf_counter", lambda: now[0])
    for size, seconds in steps:
        now[0] += 100.0  # between steps
        observer.begin_step(size, regular=True)
        now[0] += seconds
        observer.begin_backward()
        observer.bucket_done(observer.bucket_ready())
        observer.end_backward()
        observer.end_step()
        costs.append(observer.change_cost)
    return costs, observer


def _costs(monkeypatch, steps):
    return _observer(monkeypatch, steps)[0]


def test_what_a_change_of_size_costs_is_seen_from_the_first_step_after_it(monkeypatch):
    """A kernel that is compiled or tuned anew for a new size; loading and agreements do not count."""
    costs = _costs(monkeypatch, [(8, 1.0), (8, 1.0), (6, 31.0), (6, 1.0), (6, 5.0), (7, 21.0), (7, 1.0), (7, 1.0)])
    assert costs == [None] * 6 + [20.0] * 2


def test_a_change_of_size_costs_what_the_whole_window_takes(monkeypatch):
    """It is the first micro-batch that a kernel is compiled for, and the last one whose gradients are averaged."""
    run = Run(monkeypatch)
    for size, first in ((8, 2.0), (8, 2.0), (6, 32.0), (6, 2.0), (7, 32.0), (7, 2.0)):
        run.micro(size=size, forward=first)
        run.step(size=size)
    assert run.observer.change_cost == 30.0


def test_a_cost_that_comes_once_does_not_hold_up_later_changes(monkeypatch):
    """Another process that ran in that step, or a compiler that prepares for all sizes at once; the lower of two."""
    costs = _costs(monkeypatch, [(8, 1.0), (6, 31.0), (6, 1.0), (7, 1.0), (7, 1.0), (5, 31.0), (5, 1.0)])
    assert costs == [None] * 4 + [0.0] * 3
    costs = _costs(monkeypatch, [(8, 1.0), (6, 1.0), (6, 1.0), (7, 31.0), (7, 1.0), (5, 31.0), (5, 1.0)])
    assert costs == [None] * 4 + [0.0] * 2 + [30.0]


def test_sizes_that_ran_before_do_not_tell_what_a_new_one_costs(monkeypatch):
    """The short batch at the end of each epoch, and the return from it: what they need is there already."""
    first = [(8, 1.0), (6, 31.0), (6, 1.0), (7, 31.0), (7, 1.0), (3, 31.0), (7, 1.0), (7, 1.0)]
    assert _costs(monkeypatch, [*first, (3, 1.0), (7, 1.0), (7, 1.0)])[4:] == [30.0] * 7
