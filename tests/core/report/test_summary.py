"""The summary of a run: every number in it is one of the record."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.core.report.analysis import RunFigures
from lightning_hetero.core.report.limit import limit_of
from lightning_hetero.core.report.records import EndRecord, WorkerRecord
from lightning_hetero.core.report.run_record import RunRecord
from lightning_hetero.core.report.summary import MAX_ROWS, summary_of
from tests.recorded import a_round, a_run, header


@pytest.mark.parametrize("seed", range(5))
def test_the_verdict_and_the_table_have_the_figures(seed):
    run = a_run(seed)
    figures, summary = RunFigures(run), summary_of(run)
    assert summary.verdict.startswith(f"hetero_ddp: {figures.speed_up:.2f}x over even sizes (predicted); ")
    assert f"{100 * figures.idle:.0f} % idle" in summary.verdict
    assert summary.verdict.endswith(f"limited by: {limit_of(figures)}")
    assert len(summary.rows) == 3
    for row, one in zip(summary.rows, figures.workers, strict=True):
        assert row[:2] == (str(one.rank), f"device {one.rank}")
        assert row[2] == f"{one.size:.0f} ({100 * one.share:.0f} %)"
        assert float(row[3]) == pytest.approx(one.rate, rel=1e-3)
        assert float(row[4].removesuffix(" ms")) == pytest.approx(one.compute * 1e3, rel=1e-3)
        waits, share = row[5].removesuffix(" %)").split(" ms (")
        assert float(waits) == pytest.approx((figures.step_time - one.compute) * 1e3, rel=5e-3)
        assert share == f"{100 * (1 - one.compute / figures.step_time):.0f}"
        assert row[6] == "1.0 GB"


def test_the_lines_say_what_was_decided_and_why():
    text = summary_of(a_run()).text()
    assert "ms with even sizes until the first change" in text
    assert "1 change of the plan" in text
    assert "optimum of the time model" in text
    assert "the split stays: optimum: runs already" in text
    assert "1 straggler, 0.1 s lost; most by rank 1 (data)" in text
    assert re.search(r"newest measured change: step [\d.]+ -> [\d.]+ ms \(predicted [\d.]+\) at epoch 0 step 20", text)
    unknown = replace(a_run(), gains=tuple(replace(one, predicted=math.nan) for one in a_run().gains))
    assert re.search(r"newest measured change: step [\d.]+ -> [\d.]+ ms at epoch 0 step 20", summary_of(unknown).text())


def test_the_line_on_steps_has_the_figures():
    run = a_run()
    figures = RunFigures(run)
    (line,) = [one for one in summary_of(run).lines if one.startswith("step:")]
    found = [float(number) for number in re.findall(r"[\d.]+", line)]
    wanted = figures.step_time_before, figures.step_time, figures.predicted, 0.1 * figures.share_of_optimum
    assert found == pytest.approx([1e3 * one for one in wanted], rel=2e-3)
    (line,) = [one for one in summary_of(replace(run, rounds=run.rounds[:2])).lines if one.startswith("step:")]
    assert "at first" not in line, "the split has not changed"
    assert line.startswith(f"step: {1e3 * figures.step_time_before:.4g} ms (predicted ")


@pytest.mark.parametrize(("rank", "who"), [(0, "rank 0 (data)"), (-1, "the link")])
def test_the_worst_straggler_is_named(rank, who):
    run = a_run()
    lines = tuple(replace(one, rank=rank) for one in run.stragglers)
    assert f"1 straggler, 0.1 s lost; most by {who}" in summary_of(replace(run, stragglers=lines)).lines


def test_a_run_that_failed_says_so():
    run = a_run()
    failed = replace(run, end=EndRecord(1.0, 0, 3, 3, "RuntimeError: boom"))
    assert summary_of(failed).lines[-1] == "ended early: RuntimeError: boom"
    assert "ended early" not in summary_of(run).text()


@pytest.mark.parametrize("more", [0, 1, 40])
def test_steps_that_no_sync_round_has_seen_are_named(more):
    run = a_run()
    seen = sum(one.count for one in run.rounds)
    ended = replace(run, end=EndRecord(1.0, 0, 3, seen + more))
    said = f"the last {more} of {seen + more} steps are not in these figures: no sync round followed them"
    assert ended.unseen == more
    assert (said in summary_of(ended).lines) == (more > 0.05 * seen)
    assert ("not in these figures" in summary_of(ended).text()) == (more == 40)
    assert replace(run, end=None).unseen == replace(run, end=EndRecord(1.0, 0, 3, seen - 1)).unseen == 0


def test_without_timed_steps_the_verdict_says_so():
    assert "no step was timed" in summary_of(RunRecord.of([header()])).text()


def test_many_workers_give_a_short_table():
    nodes = [(0.001, 0.0, 0.002, 0.001 * i) for i in range(40)]
    run = RunRecord.of([header(40), a_round(np.random.default_rng(0), (16,) * 40, nodes=nodes)])
    summary = summary_of(run)
    assert [row[0] for row in summary.rows] == [str(i) for i in range(40 - MAX_ROWS, 40)]
    assert f"({40 - MAX_ROWS} workers more" in summary.lines[0]
    assert all(len(line) < 400 for line in summary.text().splitlines())


def test_bounds_and_long_names_fit_into_the_table():
    record = a_round(np.random.default_rng(0), (16,), nodes=[(0.001, 0, 0.001, 0)], max_local=(20,))
    run = RunRecord.of([replace(header(1), workers=(WorkerRecord("a", "x" * 99),)), record])
    row = summary_of(run).rows[0]
    assert row[1] == "x" * 28
    assert row[6] == " (<= 20)"


def test_columns_are_aligned():
    lines = summary_of(a_run()).text().splitlines()
    widths = {len(line) for line in lines[1:5]}
    assert len(widths) == 1
