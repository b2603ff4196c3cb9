"""Figures of a run, against numpy on the lines of its record."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import PHASES, RunFigures, even_of, is_even
from lightning_hetero.core.report.json_lines import as_line
from lightning_hetero.core.report.records import EndRecord
from lightning_hetero.core.report.run_record import RunRecord
from tests.recorded import a_round, a_run, header

NODES = [(0.001, 0.002, 0.002, 0.001), (0.002, 0.002, 0.004, 0.001)]
SEEDS = range(20)


def raw(run):
    """The rounds as plain JSON."""
    return [json.loads(as_line(one)) for one in run.rounds]


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_those_of_the_lines(seed):
    run = a_run(seed, workers=2 + seed % 4)
    figures, rounds = RunFigures(run), raw(run)
    last = [one for one in rounds if one["sizes"] == rounds[-1]["sizes"]]
    weights = np.array([one["count"] for one in last], dtype=float)

    def mean(name):
        return np.average([one[name] for one in last], axis=0, weights=weights)

    step = mean("step_time")
    compute = sum(mean(name) for name in PHASES if name in last[0])
    close = {"rel": 1e-4}
    assert figures.step_time == pytest.approx(step, **close)
    assert figures.even == pytest.approx(mean("even"), **close)
    assert figures.speed_up == pytest.approx(mean("even") / step, **close)
    assert figures.predicted == pytest.approx(mean("predicted"), **close)
    assert figures.step_time_before == pytest.approx(np.mean([one["step_time"] for one in rounds[:2]]), **close)
    assert figures.idle == pytest.approx(1 - compute.mean() / step, **close)
    assert [one.idle for one in figures.workers] == pytest.approx(1 - compute / step, **close)
    assert figures.rate == pytest.approx(sum(last[-1]["sizes"]) / step, **close)
    assert [one.rate for one in figures.workers] == pytest.approx(np.array(last[-1]["sizes"]) / step, **close)
    solo = (np.array(last[-1]["sizes"]) / compute).sum()
    assert figures.share_of_solo == pytest.approx(figures.rate / solo, **close)
    assert figures.link_share == pytest.approx(mean("link") / step, **close)
    taken = sum(one["count"] * one["step_time"] for one in rounds)
    even = sum(one["count"] * (one["step_time"] if i < 2 else one["even"]) for i, one in enumerate(rounds))
    assert figures.speed_up_of_run == pytest.approx(even / taken, **close)
    assert figures.lost == pytest.approx(0.1)


def test_the_optimum_is_the_best_of_all_splits():
    generator = np.random.default_rng(0)
    figures = RunFigures(RunRecord.of([header(2), a_round(generator, (20, 12), nodes=NODES)]))
    best = min(
        max((q + k) * b + s + m for (q, s, k, m), b in zip(NODES, (a, 32 - a), strict=True)) + 0.004
        for a in range(1, 32)
    )
    assert figures.optimum == pytest.approx(best)
    assert figures.share_of_optimum == pytest.approx(min(best / figures.step_time, 1.0))


def test_bounds_count_for_the_optimum():
    generator = np.random.default_rng(0)
    bounded = a_round(generator, (18, 14), nodes=NODES, max_local=(18, 100))
    figures = RunFigures(RunRecord.of([header(2), bounded]))
    assert figures.optimum == pytest.approx(figures.step_time)
    assert figures.share_of_optimum == 1.0
    assert [one.max_local for one in figures.workers] == [18, 100]


def test_the_fewest_samples_of_a_worker_count_for_the_optimum():
    one = a_round(np.random.default_rng(0), (16, 16), nodes=NODES)
    least = header(2)
    least = replace(least, workers=tuple(replace(worker, min_local=16) for worker in least.workers))
    assert RunFigures(RunRecord.of([least, one])).optimum == pytest.approx(one.step_time)


def test_a_run_that_began_with_other_sizes_has_no_time_before():
    generator = np.random.default_rng(0)
    rounds = [a_round(generator, sizes, nodes=NODES) for sizes in ((20, 12), (16, 16))]
    assert math.isnan(RunFigures(RunRecord.of([header(2), *rounds])).step_time_before)
    assert RunFigures(RunRecord.of([header(2), *rounds[::-1]])).step_time_before == rounds[1].step_time


def limits(sizes=(16, 16), nodes=NODES, **more):
    return RunFigures(RunRecord.of([header(2), a_round(np.random.default_rng(0), sizes, nodes=nodes, **more)]))


def test_what_limits_the_step_is_named():
    assert limits().limited_by == "rank 1's backward pass"
    assert limits(data=(0.0, 0.3)).limited_by == "rank 1's loader"
    assert limits(data=(0.3, 0.0)).limited_by == "rank 0's loader"
    assert limits(link=0.2).limited_by == "the link (67% of the step)"
    assert limits((20, 10)).limited_by == "computing, balanced over all workers"
    assert limits((20, 10), data=(0.06, 0.06)).limited_by == "loading, balanced over all workers"


@pytest.mark.parametrize(("slower", "says"), [(1.08, "computing, balanced over all workers"), (1.12, "rank 1's")])
def test_workers_within_the_noise_of_their_times_are_balanced(slower, says):
    """Three standard errors of nine steps with 10 % of jitter are 10 % of the time."""
    record = a_round(np.random.default_rng(0), (16, 16), nodes=[NODES[0]] * 2)
    later = {name: getattr(record, name)[0] * np.array([1.0, slower]) for name in PHASES}
    changed = {**{name: tuple(map(float, seconds)) for name, seconds in later.items()}, "timed": 9}
    one = replace(record, jitter=(0.01, 0.1), **changed)
    assert RunFigures(RunRecord.of([header(2), one])).limited_by.startswith(says)
    steady = replace(one, jitter=(0.001, 0.001))
    assert RunFigures(RunRecord.of([header(2), steady])).limited_by.startswith("rank 1's")


def test_without_known_workers_the_optimum_has_the_usual_bounds():
    one = a_round(np.random.default_rng(0), (20, 12), nodes=NODES)
    known, unknown = (RunFigures(RunRecord.of([header(workers), one])) for workers in (2, 0))
    assert unknown.optimum == known.optimum > 0


def test_several_last_workers_are_no_single_one():
    nodes = [*NODES, NODES[0]]
    record = a_round(np.random.default_rng(0), (16, 4, 16), nodes=nodes)
    assert RunFigures(RunRecord.of([header(3), record])).limited_by == "computing, balanced over 2 of 3 workers"


def test_the_forward_pass_and_the_optimizer_can_limit():
    record = a_round(np.random.default_rng(0), (16, 16), nodes=[NODES[0]] * 2)
    slow = {name: tuple(np.array(getattr(record, name)) + [0.0, 0.1]) for name in ("forward", "optimizer")}
    for name, words in (("forward", "forward pass"), ("optimizer", "optimizer")):
        changed = replace(record, **{name: slow[name]}, step_time=record.step_time + 0.1)
        assert RunFigures(RunRecord.of([header(2), changed])).limited_by == f"rank 1's {words}"


def test_one_worker_is_not_balanced():
    record = a_round(np.random.default_rng(0), (16,), nodes=NODES[:1])
    assert RunFigures(RunRecord.of([header(1), record])).limited_by == "computing"


def test_accumulation_counts_in_times_and_rates():
    one = limits(accumulation=1)
    four = limits(accumulation=4)
    assert four.workers[1].compute == pytest.approx(4 * one.workers[1].compute)
    assert four.rate == pytest.approx(4 * 32 / four.step_time)
    assert [one.rate for one in four.workers] == pytest.approx([4 * 16 / four.step_time] * 2)
    assert four.workers[0].idle == pytest.approx(1 - four.workers[0].compute / four.step_time)


def test_even_sizes_are_their_own_measure():
    record = a_round(np.random.default_rng(0), (16, 16), nodes=NODES, even=99.0)
    assert even_of(record) == record.step_time
    assert even_of(replace(record, sizes=(17, 15))) == 99.0
    assert even_of(replace(record, sizes=(16, 17))) == record.step_time
    assert is_even((16, 17)) != is_even((16, 18))


def test_ratios_are_over_the_rounds_in_which_both_are_known():
    """Of three rounds, the slowest has no prediction of even sizes, and another no link."""
    one = a_round(np.random.default_rng(0), (20, 12), nodes=NODES, even=0.3)
    rounds = (
        replace(one, step_time=0.9, even=math.nan, link=0.09, count=7),
        replace(one, step_time=0.1, link=math.nan, count=20),
        replace(one, step_time=0.2, link=0.04, count=10),
    )
    figures = RunFigures(RunRecord.of([header(2), *rounds]))
    assert figures.step_time == pytest.approx((7 * 0.9 + 20 * 0.1 + 10 * 0.2) / 37)
    assert figures.speed_up == figures.speed_up_of_run == pytest.approx(30 * 0.3 / (20 * 0.1 + 10 * 0.2))
    assert figures.link_share == pytest.approx((7 * 0.09 + 10 * 0.04) / (7 * 0.9 + 10 * 0.2))


@pytest.mark.parametrize("records", [[], [EndRecord(1.0, 0, 0, 0)]])
def test_a_run_without_timed_steps_has_no_figures(records):
    figures = RunFigures(RunRecord.of([header(2), *records]))
    assert figures.last == figures.workers == ()
    assert figures.limited_by == "unknown: no step was timed"
    for name in ("step_time", "speed_up", "idle", "rate", "optimum", "share_of_optimum", "link_share", "even"):
        assert math.isnan(getattr(figures, name)), name


def test_rounds_without_a_model_leave_the_optimum_unknown():
    record = a_round(np.random.default_rng(0), (16, 16), nodes=NODES)
    figures = RunFigures(RunRecord.of([header(2), replace(record, nodes=(), even=math.nan, sizes=(18, 14))]))
    assert math.isnan(figures.optimum)
    assert math.isnan(figures.speed_up)
    assert figures.step_time > 0
