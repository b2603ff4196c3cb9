"""Records of rounds are medians of what was measured, and recording has a bounded share of the time."""

import itertools
import math

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.lost_time import straggler_spans
from lightning_hetero.core.report.records import ChangeRecord, EndRecord, GainRecord, RoundRecord, StragglerRecord
from lightning_hetero.core.report.summary import summary_of
from lightning_hetero.core.stragglers.detector import Straggler
from lightning_hetero.core.stragglers.round_times import exposed_link
from lightning_hetero.engine.watch.gains import Gain
from lightning_hetero.engine.watch.recorder import SAMPLED_WORKERS, Recorder, times_of
from lightning_hetero.engine.watch.time_budget import MAX_SHARE, TimeBudget
from tests.recorded import header


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def seen(steps=8, workers=2, buckets=2, seed=0, size=8.0):
    values = np.random.default_rng(seed).uniform(0.01, 0.1, (steps, workers, 9 + buckets))
    values[:, :, 0] = size
    return StepObservations.from_array(values)


PLAN = BatchPlan(16, (8, 8))


def test_a_round_has_the_medians():
    values = seen()
    values.bucket_ends[:] += 0.1
    found = times_of(values, (8, 8))
    assert found["timed"] == 8
    assert found["step_time"] == pytest.approx(np.median(values.step_time))
    names = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
    for name, field in names.items():
        assert found[name] == pytest.approx(np.median(getattr(values, field), axis=0))
    assert found["sync"] == pytest.approx(np.median(values.overlapped_sync + values.last_sync, axis=0))
    deviation = np.median(np.abs(values.compute - np.median(values.compute, axis=0)), axis=0)
    assert found["link"] == pytest.approx(np.median(exposed_link(values)))
    assert found["jitter"] == pytest.approx(1.4826 * deviation / np.median(values.compute, axis=0))


def test_only_steps_of_the_split_count():
    values = seen()
    values.local_batch_sizes[:5] = 7.0
    assert times_of(values, (8, 8))["timed"] == 3
    assert times_of(values, (8, 8)) == times_of(values.rows(slice(5, None)), (8, 8))
    assert times_of(values, (9, 7)) == {}


@pytest.mark.parametrize(("counted", "elapsed", "timed"), [(0, 8, 8), (0, 20, 8), (5, 8, 3), (8, 8, 0), (9, 8, 0)])
def test_steps_of_an_earlier_run_are_not_those_of_this_one(counted, elapsed, timed):
    """With several fits of one trainer, the first round of a fit may have steps of the fit before only."""
    recorder, values = Recorder(2, counted=counted), seen()
    recorder.describe(header(2))
    recorder.round(values, PLAN, (0, 9), elapsed, 1, even=0.2)
    assert (recorder.newest.count, recorder.newest.timed) == (max(elapsed - counted, 0), timed)
    if timed:
        assert recorder.newest.step_time == pytest.approx(np.median(values.step_time[-timed:]))
    summary_of(recorder.run)


def test_steps_are_sampled_in_full():
    values = seen()
    sample = np.array(times_of(values, (8, 8))["sample"])
    assert sample.shape == (2, 2, len(RoundRecord.SAMPLED) + 2)
    assert sample[-1, 1, :9] == pytest.approx([getattr(values, name)[-1, 1] for name in StepObservations.FIELDS])
    assert sample[-1, :, 9:] == pytest.approx(values.bucket_ends[-1])
    assert len(times_of(seen(workers=SAMPLED_WORKERS), (8,) * SAMPLED_WORKERS)["sample"]) == 2
    many = seen(workers=SAMPLED_WORKERS + 1)
    assert times_of(many, (8,) * (SAMPLED_WORKERS + 1))["sample"] == ()


def test_unknown_step_times_are_not_a_number():
    values = seen()
    values.step_time[:3] = math.nan
    assert times_of(values, (8, 8))["step_time"] == pytest.approx(np.median(values.step_time[3:]))
    values.step_time[:] = math.nan
    assert math.isnan(times_of(values, (8, 8))["step_time"])


def test_a_worker_without_samples_has_no_jitter():
    values = seen()
    for name in ("forward", "backward", "data_wait", "optimizer"):
        getattr(values, name)[:, 1] = 0.0
    assert times_of(values, (8, 8))["jitter"][1] == 0.0


def test_records_say_what_happened_and_when():
    clock, work = Clock(), itertools.count(0.0, 0.001)
    recorder = Recorder(2, TimeBudget(clock, lambda: next(work)))
    recorder.describe(header(2))
    clock.now = 2.0
    recorder.change(PlanEntry(1, 4, BatchPlan(16, (10, 6), step_time=0.2), "faster"))
    recorder.change(PlanEntry(1, 5, PLAN, "by hand"))
    recorder.round(seen(), PLAN, (1, 3), 8, 4, predicted=0.3, kept="why")
    recorder.gain(Gain(PlanEntry(1, 4, BatchPlan(16, (10, 6), step_time=0.2), "faster"), 0.3, 0.21))
    recorder.straggler(Straggler(1, "data", 0, 0.1, 0.1), (1, 5))
    recorder.straggler(Straggler(1, "data", 0, 0.0, 0.1, lost=2.0, relieved="split"), (1, 9))
    recorder.end((1, 10), 11, "finished", (1.0, 2.0))
    run = recorder.run
    assert run.workers == 2
    (one,) = run.rounds
    assert (one.time, one.epoch, one.step, one.count, one.sizes, one.accumulation) == (2.0, 1, 3, 8, (8, 8), 4)
    assert (one.predicted, one.kept) == (0.3, "why")
    assert recorder.newest is one
    assert run.changes[0] == ChangeRecord(2.0, 1, 4, (10, 6), "faster", 0.2)
    assert run.changes[1].reason == "by hand"
    assert math.isnan(run.changes[1].predicted)
    assert run.gains == (GainRecord(2.0, 1, 4, 0.3, 0.21, 0.2),)
    assert run.stragglers == (
        StragglerRecord(2.0, "begin", 1, "data", 1, 5, 0.1, 0.0),
        StragglerRecord(2.0, "end", 1, "data", 1, 9, 0.0, 2.0, "split"),
    )
    assert run.end == EndRecord(2.0, 1, 10, 11, "finished", (1.0, 2.0), overhead=pytest.approx(0.001))


def test_a_run_is_described_once():
    """A front end may say anew what runs: the run goes on, and so do its clock and its budget."""
    clock, work = Clock(), itertools.count(0.0, 0.02)
    recorder = Recorder(2, TimeBudget(clock, lambda: next(work)))
    clock.now = 5.0
    recorder.describe(header(2))
    recorder.round(seen(), PLAN, (0, 7), 8, 1)
    clock.now = 8.0
    recorder.describe(header(3))
    assert (recorder.run.workers, recorder.time, recorder.budget.spent) == (2, 3.0, pytest.approx(0.02))


def test_lines_that_the_file_has_merged_count_as_dropped():
    recorder = Recorder(2)
    recorder.file.max_bytes = 10_000
    recorder.describe(header(2))
    for i in range(40):
        recorder.round(seen(), PLAN, (0, i), 1, 1)
    recorder.end((0, 40), 40, "finished", ())
    assert recorder.run.end.dropped == 40 - len(recorder.run.rounds) > 10


def test_many_workers_have_a_file_that_holds_their_rounds():
    workers = 2000
    recorder = Recorder(workers)
    recorder.describe(header(workers))
    recorder.round(
        seen(workers=workers), BatchPlan(8 * workers, (8,) * workers), (0, 7), 8, 1, nodes=((0.123456,) * 4,) * workers
    )
    assert recorder.file.max_bytes > 30 * len(as_line(recorder.newest))


def test_nothing_is_recorded_before_the_run_is_described():
    recorder = Recorder(2)
    recorder.round(seen(), PLAN, (0, 3), 8, 1)
    recorder.change(PlanEntry(0, 4, PLAN, "faster"))
    recorder.gain(Gain(PlanEntry(0, 4, PLAN, "faster"), 0.3, 0.2))
    recorder.straggler(Straggler(1, "data", 0, 0.1, 0.1), (0, 5))
    recorder.end((0, 1), 2, "finished", ())
    assert recorder.run is None


def test_recording_takes_its_share_of_the_time_and_no_more():
    """Each round takes 50 ms of work; after 100 s only so many were recorded as fit into the share, and one more."""
    clock, work = Clock(), Clock()

    class Slow(Recorder):
        @property
        def may(self):
            allowed = super().may
            with self.budget.working():
                work.now += 0.05 if allowed else 0.0
            return allowed

    recorder = Slow(2, TimeBudget(clock, work))
    recorder.describe(header(2))
    for i in range(1000):
        clock.now = 0.1 * i
        recorder.round(seen(), PLAN, (0, i), 1, 1)
    assert recorder.budget.spent <= MAX_SHARE * 100 + 0.05
    assert len(recorder.run.rounds) == pytest.approx(MAX_SHARE * 100 / 0.05, abs=1)
    assert sum(one.count for one in recorder.run.rounds) == recorder.run.rounds[-1].step + 1
    recorder.end((0, 1000), 1000, "finished", ())
    assert recorder.run.end.dropped == 1000 - len(recorder.run.rounds)
    assert recorder.run.rounds[-1].step == 999, "the run ends with its newest round"
    assert sum(one.count for one in recorder.run.rounds) == 1000


def busy(rounds, may, **more):
    """A recorder of as many rounds of 8 steps, of which those have time that ``may`` names."""
    clock, work = Clock(), Clock()
    recorder = Recorder(2, TimeBudget(clock, work), **more)
    recorder.describe(header(2))
    for i in range(rounds):
        clock.now += 10_000.0
        with recorder.budget.working():
            work.now += 0.0 if i in may else 1000.0
        recorder.round(seen(), PLAN, (0, 8 * i + 7), 8, 1, even=0.1 * i, kept=f"round {i}")
        with recorder.budget.working():
            work.now -= 0.0 if i in may else 1000.0
    clock.now += 5.0
    recorder.straggler(Straggler(1, "data", 0, 0.1, 0.1, lost=2.0, relieved="run ended"), (0, 8 * rounds))
    recorder.end((0, 8 * rounds), 8 * rounds, "finished", (), even=9.0)
    return recorder.run


def test_a_round_counts_the_steps_of_those_left_out_before_it():
    run = busy(5, {0, 3, 4})
    assert [(one.step, one.count, one.even) for one in run.rounds] == [
        (7, 8, 0.0),
        (31, 24, pytest.approx(0.3)),
        (39, 8, pytest.approx(0.4)),
    ]
    assert run.end.dropped == 2


def test_a_last_round_without_time_is_written_at_the_end_with_what_is_known_by_then():
    run = busy(4, {0})
    assert [(one.time, one.step, one.count, one.even, one.kept) for one in run.rounds] == [
        (10_000.0, 7, 8, 0.0, "round 0"),
        (40_000.0, 31, 24, 9.0, "round 3"),
    ]
    assert (run.end.time, run.end.dropped) == (40_005.0, 2)
    (span,) = straggler_spans(run)
    assert span.first == 1, "a straggler that the run ends was there in its last round"


def test_rounds_left_out_may_have_steps_of_an_earlier_run():
    assert [(one.step, one.count) for one in busy(3, {1, 2}, counted=9).rounds] == [(15, 7), (23, 8)]
