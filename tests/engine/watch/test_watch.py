"""The watch over a run: the same metrics on all ranks, the record and the log on rank 0."""

import itertools
import json
import math

import pytest

from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.stragglers.detector import NOBODY
from lightning_hetero.engine.watch.watch import RunWatch
from tests.engine.watch.watched import CONTEXT, CPU, EVEN, UNEVEN, Run, seen
from tests.recorded import header


def test_a_round_is_recorded_with_what_is_known():
    run = Run()
    run.round(seen((0.08, 0.08, 0.24)), kept="why", density=0.5)
    (one,) = run.watch.run.rounds
    assert (one.step, one.count, one.sizes, one.kept, one.density) == (8, 8, (8, 8, 8), "why", 0.5)
    assert len(one.nodes) == 3
    assert math.isnan(one.predicted), "nothing was known before these steps"
    assert one.even == pytest.approx(0.25, rel=0.1)
    assert run.watch.newest is one


def test_a_round_has_what_was_predicted_before_its_steps():
    """By the policy's model if it has one; a model that only watches is not what the policy predicts."""
    run, first, second = Run(), seen((0.08, 0.08, 0.24)), seen((0.1, 0.1, 0.3))
    run.round(first)
    run.round(second)
    assert run.watch.newest.predicted == pytest.approx(0.25, rel=0.1), "by the first round, not by its own 0.31"
    assert run.watch.newest.error > 0.0
    assert all(map(math.isnan, run.watch.predictions.predicted))


def test_what_the_policy_predicts_of_the_next_steps_is_kept():
    run, values = Run(), seen((0.08, 0.08, 0.24))
    for number, (predicted, error, even) in enumerate([(0.123, 0.001, 0.3), (0.124, None, math.nan), (None,) * 3], 1):
        done = RoundResult(None, values, None, predicted, error=error, even=math.nan if even is None else even)
        run.watch.observe(done, EVEN, (0, 8 * number), 8 * number, 1)
        if number == 1:
            assert all(map(math.isnan, run.watch.predictions.predicted))
        elif number == 2:
            one = run.watch.newest
            assert run.watch.predictions.predicted == (one.predicted, one.error) == (0.123, 0.001)
            assert math.isnan(one.even)
            assert one.kept == ""
    assert run.watch.predictions.predicted[0] == 0.124
    assert math.isnan(run.watch.predictions.predicted[1])
    run.watch.observe(RoundResult(None, values, None, 0.125), EVEN, (0, 32), 32, 1)
    assert run.watch.predictions.predicted[0] == 0.124, "a round that predicts nothing leaves what was predicted before"
    run.watch.observe(RoundResult(None, values, None, 0.3), EVEN, (0, 40), 40, 2)
    assert math.isnan(run.watch.predictions.predicted[0]), "steps of more micro-batches were not predicted"


def test_a_new_plan_has_the_prediction_with_which_it_was_adopted():
    run = Run()
    for plan in (EVEN, EVEN, UNEVEN):
        run.watch.observe(RoundResult(None, seen((0.1, 0.1, 0.2), plan), None, 0.3), plan, (0, 8), run.steps, 1)
    assert run.watch.newest.predicted == 0.2
    assert run.watch.predictions.predicted[0] == 0.2
    run.watch.observe(RoundResult(None, seen((0.1, 0.1, 0.2)), None, 0.3), None, (0, 8), run.steps, 1)
    assert all(map(math.isnan, run.watch.predictions.predicted))


def test_the_model_of_the_policy_comes_first():
    run, fast, slow = Run(), seen((0.08, 0.08, 0.24)), seen((0.16, 0.16, 0.48))
    planner = PerfModelPlanner().observe(fast, CONTEXT)
    even = run.watch.even_step(planner, slow, EVEN, CONTEXT)
    assert even == pytest.approx(planner.predict(EVEN, CONTEXT))
    run.round(slow, even=even)
    assert run.watch.newest.nodes == tuple(map(tuple, planner.cluster(CONTEXT).array.tolist()))
    assert math.isnan(run.watch.newest.predicted), "the round says what the policy predicts, and it has said nothing"


def test_a_round_has_no_predictions_of_an_earlier_one():
    """Neither without a step, nor where the user gives the plan: the split is another one by then."""
    run = Run()
    run.round(seen((0.08, 0.08, 0.24)))
    run.round(StepObservations.empty(3), UNEVEN)
    run.round(seen((0.08, 0.08, 0.24)))
    run.round(seen((0.12, 0.12, 0.15), UNEVEN), UNEVEN, even=math.nan)
    rounds = run.watch.run.rounds
    assert [one.predicted for one in rounds[1:]] == pytest.approx([0.2, rounds[2].predicted, 0.2])
    assert rounds[2].predicted == pytest.approx(0.25, rel=0.1)
    assert [len(one.nodes) for one in rounds] == [3, 0, 3, 0]


@pytest.mark.parametrize("given", [False, True])
def test_the_last_round_has_its_own_predictions_even_if_there_was_no_time(given):
    work = itertools.count(0.0, 0.05)
    run = Run(work=lambda: next(work))
    run.round(seen((0.08, 0.08, 0.24)))
    run.round(seen((0.16, 0.16, 0.48)))
    run.round(seen((0.3, 0.3, 0.9)), even=math.nan if given else None)
    record = run.watch.finish()
    one = record.rounds[-1]
    assert (one.step, record.end.dropped) == (24, 2)
    assert (len(one.nodes), math.isfinite(one.even)) == ((0, False) if given else (3, True))
    assert one.predicted == pytest.approx(0.25, rel=0.1), "by the first round, the only one with time for its model"


@pytest.mark.parametrize("records", [True, False])
def test_a_change_is_logged_on_one_rank_recorded_or_not(caplog, records):
    caplog.set_level("INFO", logger="lightning_hetero")
    for rank in (0, 1):
        run = Run(rank, records)
        run.round(seen((0.1, 0.1, 0.24)), entry=PlanEntry(0, 9, UNEVEN, "faster"))
        run.round(seen((0.12, 0.12, 0.15), UNEVEN), UNEVEN)
    assert [line for line in caplog.messages if line.startswith("the change of the split")] == [
        "the change of the split at epoch 0 step 9: step 250 -> 160 ms measured (predicted 200 ms)"
    ]


def test_a_plan_of_the_same_sizes_has_no_gain():
    run = Run()
    run.round(seen((0.1, 0.1, 0.24)), entry=PlanEntry(0, 9, EVEN, "another reason"))
    run.round(seen((0.1, 0.1, 0.2)))
    assert [one.reason for one in run.watch.run.changes] == ["another reason"]
    assert run.watch.run.gains == ()


def test_a_change_is_recorded_measured_and_logged(caplog):
    caplog.set_level("INFO", logger="lightning_hetero")
    run, entry = Run(), PlanEntry(0, 9, UNEVEN, "faster")
    run.round(seen((0.1, 0.1, 0.24)), entry=entry)
    run.round(seen((0.12, 0.12, 0.15), UNEVEN), UNEVEN)
    assert run.watch.run.changes[0].reason == "faster"
    (gain,) = run.watch.run.gains
    assert (gain.before, gain.after, gain.predicted) == (pytest.approx(0.25), pytest.approx(0.16), 0.2)
    assert "the change of the split at epoch 0 step 9: step 250 -> 160 ms measured (predicted 200 ms)" in caplog.text


def test_all_ranks_have_the_same_metrics_and_one_records():
    first, other = Run(0), Run(1)
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),) * 2:
        for run in (first, other):
            run.round(seen(times), even=0.4)
    assert first.watch.metrics() == other.watch.metrics()
    assert first.watch.metrics()["hetero/straggler"] == 2.0
    assert first.watch.metrics()["hetero/lost_seconds"] == pytest.approx(1.6)
    assert first.watch.metrics()["hetero/speed_up"] == 1.0
    assert other.watch.run is other.watch.newest is other.watch.path is None
    assert math.isnan(other.watch.even_step(None, seen((1, 1, 1)), EVEN, CONTEXT))


def test_the_speed_over_equal_sizes_is_predicted_over_measured():
    run = Run()
    run.round(seen((0.12, 0.12, 0.15), UNEVEN), UNEVEN, even=0.32)
    assert run.watch.predictions.speed_up == pytest.approx(0.32 / 0.16)
    run.round(seen((0.12, 0.12, 0.15), UNEVEN), UNEVEN, even=math.nan)
    assert "hetero/speed_up" not in run.watch.metrics()


def test_the_speed_is_that_of_the_steps_of_the_split_that_were_timed():
    run, values = Run(), seen((0.12, 0.12, 0.15), UNEVEN)
    values.step_time[0], values.step_time[1] = math.nan, 5.0
    values.step_time[4:], values.local_batch_sizes[4:] = 0.5, (9, 8, 7)
    run.round(values, UNEVEN, even=0.32)
    assert run.watch.predictions.speed_up == pytest.approx(0.32 / 0.16)
    values.step_time[:4] = math.nan
    run.round(values, UNEVEN, even=0.32)
    assert math.isnan(run.watch.predictions.speed_up)


def test_sizes_that_differ_by_the_remainder_are_equal():
    run, plan = Run(), BatchPlan(25, (9, 8, 8))
    run.round(seen((0.1, 0.1, 0.1), plan), plan, even=0.5)
    assert run.watch.predictions.speed_up == 1.0
    plan = BatchPlan(24, (9, 8, 7))
    run.round(seen((0.1, 0.1, 0.1), plan), plan, even=0.22)
    assert run.watch.predictions.speed_up == pytest.approx(2.0)


@pytest.mark.parametrize("values", [seen((0.1, 0.1, 0.1)), StepObservations.empty(3)])
def test_without_a_plan_a_step_or_a_model_no_speed_is_known(values):
    run = Run()
    run.round(values, EVEN, even=0.5 if values.num_steps == 0 else math.nan)
    assert math.isnan(run.watch.predictions.speed_up)
    run.round(values, None, even=0.5, entry=PlanEntry(0, 9, EVEN, "first"))
    assert math.isnan(run.watch.predictions.speed_up)
    assert math.isnan(run.watch.even_step(None, values, None, CONTEXT))
    assert len(run.watch.run.rounds) == 1
    assert run.watch.run.changes == ()


def test_before_anything_there_is_no_straggler():
    assert Run().watch.metrics() == {"hetero/straggler": float(NOBODY), "hetero/lost_seconds": 0.0}


def test_a_run_ends_once():
    run = Run()
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),):
        run.round(seen(times))
    run.watch.memory.everyone = (1.0, 2.0, 3.0)
    record = run.watch.finish("RuntimeError: boom")
    assert (record.end.status, record.end.memory, record.end.steps) == ("RuntimeError: boom", (1.0, 2.0, 3.0), 24)
    assert (record.end.epoch, record.end.step) == (0, 24)
    assert (record.stragglers[-1].relieved, record.stragglers[-1].step) == ("run ended", 24)
    assert run.watch.finish() is None


def test_a_run_ends_where_its_steps_end_and_the_next_one_is_a_run_of_its_own(tmp_path):
    run = Run()
    run.watch.describe(header(3), tmp_path)
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),):
        run.round(seen(times))
    assert run.watch.path == tmp_path / "hetero_run.jsonl"
    assert run.watch.recorder.folder == tmp_path
    first = run.watch.finish("finished", (0, 29), 30)
    assert (first.end.epoch, first.end.step, first.end.steps) == (0, 29, 30)
    assert run.watch.run is run.watch.newest is run.watch.path is None
    run.steps = 32  # of which 30 are those of the first run
    run.watch.describe(header(3), tmp_path)
    run.round(seen((0.1, 0.1, 0.2)))
    second = run.watch.finish("finished", (1, 20), 50)
    assert [(one.count, one.step) for one in second.rounds] == [(10, 40)]
    assert [(one.event, one.relieved) for one in second.stragglers] == [("begin", ""), ("end", "run ended")]
    assert (second.stragglers[-1].epoch, second.stragglers[-1].step) == (1, 20)
    assert (second.end.steps, second.end.dropped) == (20, 0)
    lines = (tmp_path / "hetero_run.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[kinds.index("end") + 1 :] == ["run", "straggler", "round", "straggler", "end"]
    assert RunRecord.from_lines(lines).end.steps == 20


def test_steps_of_a_run_without_a_record_are_not_those_of_the_next():
    run = Run()
    run.watch = RunWatch(0, 3, CPU)
    run.round(seen((0.1, 0.1, 0.1)))
    assert run.watch.finish("finished", (0, 9), 10) is None
    run.watch.describe(header(3), None)
    run.round(seen((0.1, 0.1, 0.1)))
    record = run.watch.finish("finished", (1, 6), 16)
    assert (record.end.steps, record.rounds[0].count) == (6, 6)


def test_without_a_record_there_are_the_same_metrics(caplog):
    run, recorded = Run(records=False), Run()
    for one in (run, recorded):
        for _ in range(4):
            one.round(seen((0.08, 0.08, 0.24)))
            one.round(seen((0.12, 0.12, 0.15), UNEVEN), UNEVEN)
    assert run.watch.metrics() == recorded.watch.metrics()
    assert run.watch.metrics()["hetero/speed_up"] > 1.1
    for times in ((0.1, 0.1, 0.1),) * 2 + ((0.1, 0.1, 0.2),) * 3:
        run.round(seen(times))
    assert "rank 2 (device 2) has made all others wait" in caplog.text
    assert run.watch.run is None
    assert run.watch.finish() is None


@pytest.mark.parametrize("records", [True, False])
def test_predictions_take_their_share_of_the_time_and_no_more(records):
    """Each takes 50 ms of work; in 10 s only one fits, and with one more the share is used up."""
    work = itertools.count(0.0, 0.05)
    run = Run(records=records, work=lambda: next(work))
    known = [run.watch.even_step(None, seen((0.08, 0.08, 0.24)), EVEN, CONTEXT) for _ in range(4)]
    assert [math.isfinite(one) for one in known] == [True, False, False, False]
    record = run.watch.finish()
    run.watch.describe(header(3), None)
    known = [run.watch.even_step(None, seen((0.08, 0.08, 0.24)), EVEN, CONTEXT) for _ in range(2)]
    assert [math.isfinite(one) for one in known] == [True, False], "another run has a budget of its own"
    for one in (record, run.watch.finish()) if records else ():
        assert one.end.overhead == pytest.approx(0.05)


def test_one_worker_is_not_watched():
    assert RunWatch(0, 1, CPU).recorder is None
    assert RunWatch(0, 2, CPU).recorder is not None


def test_a_run_without_a_round_ends_where_it_began():
    end = Run().watch.finish("ValueError: odd").end
    assert (end.epoch, end.step, end.steps, end.status) == (0, 0, 0, "ValueError: odd")
