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
    assert figures.share_of_optimum == pytest.approx(best / figures.step_time), "measured as the model says"


@pytest.mark.parametrize("sizes", [(20, 12), (16, 16), (31, 1), (19, 13)])
def test_time_that_no_split_saves_leaves_the_share_of_the_optimum(sizes):
    """Steps that all take 50 ms more than the model says still run at their optimum."""
    one = a_round(np.random.default_rng(0), sizes, nodes=NODES)
    longer = replace(one, step_time=one.step_time + 0.05)
    exact, found = (RunFigures(RunRecord.of([header(2), each])) for each in (one, longer))
    saves = one.step_time * (1 - exact.share_of_optimum)
    assert found.step_time * (1 - found.share_of_optimum) == pytest.approx(saves, abs=1e-9)
    assert (saves > 0) == (exact.optimum < one.step_time - 1e-9)
    if saves == 0:
        assert found.share_of_optimum == 1.0


def test_the_newest_model_says_how_far_the_optimum_is():
    older, newer = (a_round(np.random.default_rng(0), (16, 16), nodes=nodes) for nodes in (NODES, NODES[::-1]))
    equal = replace(newer, nodes=(NODES[0],) * 2)
    assert RunFigures(RunRecord.of([header(2), older, equal])).share_of_optimum == 1.0
    assert RunFigures(RunRecord.of([header(2), equal, older])).share_of_optimum < 0.9


def test_a_model_that_is_far_off_gives_no_negative_share():
    one = a_round(np.random.default_rng(0), (31, 1), nodes=NODES)
    assert RunFigures(RunRecord.of([header(2), replace(one, step_time=0.001)])).share_of_optimum == 0.0


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


def test_without_known_workers_the_optimum_has_the_usual_bounds():
    one = a_round(np.random.default_rng(0), (20, 12), nodes=NODES)
    known, unknown = (RunFigures(RunRecord.of([header(workers), one])) for workers in (2, 0))
    assert unknown.optimum == known.optimum > 0


def test_accumulation_counts_in_times_and_rates():
    rounds = [a_round(np.random.default_rng(0), (16, 16), nodes=NODES, accumulation=number) for number in (1, 4)]
    one, four = (RunFigures(RunRecord.of([header(2), record])) for record in rounds)
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
    for name in ("step_time", "speed_up", "idle", "rate", "optimum", "share_of_optimum", "link_share", "even"):
        assert math.isnan(getattr(figures, name)), name


def test_rounds_without_a_model_leave_the_optimum_unknown():
    record = a_round(np.random.default_rng(0), (16, 16), nodes=NODES)
    figures = RunFigures(RunRecord.of([header(2), replace(record, nodes=(), even=math.nan, sizes=(18, 14))]))
    assert math.isnan(figures.optimum)
    assert math.isnan(figures.speed_up)
    assert figures.step_time > 0


def test_bounds_that_no_split_keeps_leave_the_optimum_unknown():
    """A total that grew beyond what the workers' memory holds must not end the summary."""
    one = a_round(np.random.default_rng(0), (16, 16), nodes=NODES, max_local=(15, 15))
    figures = RunFigures(RunRecord.of([header(2), one]))
    assert math.isnan(figures.optimum)
    assert math.isnan(figures.share_of_optimum)


def test_a_split_beyond_its_bounds_has_no_share_above_one():
    one = a_round(np.random.default_rng(0), (20, 12), nodes=NODES, max_local=(10, 100))
    figures = RunFigures(RunRecord.of([header(2), one]))
    assert figures.optimum > figures.step_time
    assert figures.share_of_optimum == 1.0
