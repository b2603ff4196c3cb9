"""Evidence of StellaTrain: what its benchmark computes besides timing, and that each row's figure is in its result."""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def loaded(path):
    """A module of the benchmarks, which find each other beside themselves."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    """`benchmarks/papers/stellatrain.py`; what its import changes is as before afterwards."""
    threads, path, variables = torch.get_num_threads(), list(sys.path), {v: os.environ.get(v) for v in VARIABLES}
    sys.path[:0] = [str(BENCHMARKS / "papers"), str(BENCHMARKS)]
    try:
        yield loaded(BENCHMARKS / "papers" / "stellatrain.py")
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = path
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(scope="module")
def evidence():
    path = list(sys.path)
    sys.path[:0] = [str(BENCHMARKS / "evidence")]
    try:
        loaded(BENCHMARKS / "evidence" / "row.py")
        yield loaded(BENCHMARKS / "evidence" / "stellatrain.py")
    finally:
        sys.path[:] = path


# the rows


def test_every_row_has_its_figure_in_a_committed_result(evidence):
    for row in evidence.ROWS:
        text = row.found()
        assert len(text) > 20, row.where
        assert text.endswith("."), row.where
        assert "nan" not in text, row.where


def test_every_command_is_one_that_the_benchmark_has(evidence):
    source = (BENCHMARKS / "papers" / "stellatrain.py").read_text()
    for row in evidence.ROWS:
        if row.command:
            _, script, *arguments = row.command.split()
            assert (ROOT / script).exists()
            assert all(f'"{argument}"' in source for argument in arguments)
            assert (BENCHMARKS / "results" / row.result).stat().st_size < 100_000


# the paper's own tables


def test_what_the_paper_prints_as_a_deviation_is_none(bench):
    tables = sys.modules["_stella_tables"]
    for times in ([0.3, 0.3], [0.1, 0.5, 0.2]):
        assert tables.printed_radicand(times) < 0 <= tables.variation(times)


def test_the_papers_cost_saving_follows_from_its_gain_in_throughput(bench):
    (row,) = sys.modules["_stella_tables"].cloud(share=1.0)
    assert row["saved_by_its_gain"] == pytest.approx(0.645, abs=0.001)
    assert row["time_by_its_gain"] == pytest.approx(-0.289, abs=0.001)
    assert row["time_by_its_saving_fp16"] > 0.09  # so it cannot be faster and cheaper in FP16
    assert row["our_gain"] == pytest.approx(row["ideal_gain"])


def test_models_need_more_than_the_wan_carries(bench):
    tables = sys.modules["_stella_tables"]
    assert min(row["mbit"] for row in tables.needed_rates()) > 10 * tables.WAN_MBIT


def test_less_is_sent_over_a_slower_link(bench):
    rows = sys.modules["_stella_tables"].choices()
    sent = [row["density"] / row["total"] for row in rows]
    assert sent == sorted(sent)


# the small task in one process


def test_selection_delay_and_batch_are_those_that_were_asked_for(bench):
    task = sys.modules["_stella_task"]
    dense = task.losses(task.Training(), 2240)
    assert len(dense) == 20
    assert dense[-1] < dense[0]
    assert task.losses(task.Training("exact", 1.0), 2240) == pytest.approx(dense, rel=1e-3)
    late = task.losses(task.Training(delay=1), 336)
    assert late[0] == dense[0]
    assert late[1] != dense[1]  # it is taken with the first weights
    assert task.losses(task.Training(delay=1, fresh=1.0), 2240) == pytest.approx(dense, rel=1e-3)


def test_nothing_is_lost_by_a_selection(bench):
    task = sys.modules["_stella_task"]
    how = task.Training("exact", 0.25, block=1)
    chosen, gradient = task.Chosen(how, 64), torch.randn(64, generator=torch.Generator().manual_seed(0))
    rows, values = chosen.take(gradient)
    assert len(rows) == 16
    total = chosen.residual.clone()
    total[rows] += values
    torch.testing.assert_close(total.view(-1), gradient)
    assert values.abs().min() >= chosen.residual.abs().max()
    assert len(task.Chosen(replace(how, selector="random"), 64).take(gradient)[0]) == 16


def test_samples_to_a_loss_are_counted_to_the_end_of_the_window(bench):
    samples_to = sys.modules["_stella_task"].samples_to
    assert samples_to([1.0] * 10 + [0.0] * 10, 112, target=0.05) == 20 * 112
    assert samples_to([1.0] * 30, 112) == float("inf")
    assert samples_to([0.0] * 3, 1120) == 1120


# emulated devices


def test_a_split_by_speed_computes_as_long_as_the_paper_says(bench):
    speed = sys.modules["_stella_speed"]
    load = speed.WORKLOADS["ViT-B"]
    assert load.split == (180, 60)
    assert load.seconds(load.split) == pytest.approx(60 / 198)
    assert [profile.seconds(b) for profile, b in zip(load.profiles, load.split, strict=True)] == pytest.approx(
        [180 / 600, 60 / 198]
    )
    for name, load in speed.WORKLOADS.items():
        if name != "digits":
            assert load.matrices * speed.WIDE * speed.NARROW == pytest.approx(load.elements, rel=0.02)


def test_the_small_task_sends_and_computes_in_the_same_ratio_as_the_model(bench):
    speed = sys.modules["_stella_speed"]
    small, large = speed.WORKLOADS["digits"], speed.WORKLOADS["ViT-B"]
    assert sum(p.numel() for p in small.model(0.05).parameters()) == small.elements
    ratios = [load.elements / load.link(100) / load.seconds(load.split) for load in (small, large)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.02)


def phase_record(speed, seconds, losses=()):
    """What a training of the kind "dense" leaves behind, whose phases begin one after another."""
    begins, steps, now = [], [], 100.0
    for durations in seconds:
        begins.append(now)
        ends = []
        for duration in durations:
            now += duration
            ends.append(now)
        same = [0.0] * len(ends)
        steps.append(
            {
                "ends": ends,
                "spent": same,
                "update": same,
                "host": same,
                "density": [None] * len(ends),
                "split": [None] * len(ends),
            }
        )
    return {"begins": begins, "steps": steps, "losses": list(losses)}


def test_the_first_steps_of_a_phase_do_not_count(bench):
    speed = sys.modules["_stella_speed"]
    record = phase_record(speed, [[1.0] * 3, [9.0, 2.0, 2.0, 2.0], [5.0]])
    row = speed.row_of(record, "ViT-B", "dense", 1, 1000)
    assert (row["steps"], row["step_ms"]) == (3, pytest.approx(2000.0))
    assert row["samples_per_s"] == pytest.approx(120.0)


def test_steps_are_assigned_to_the_rate_that_the_link_had(bench):
    speed = sys.modules["_stella_speed"]
    record = phase_record(speed, [[1.0] * 4])
    found = speed.segments(record, 0, [(100.0, 600.0), (102.0, 50.0)])
    assert [part[:3] for part in found] == [[0.0, 600.0, 1000.0], [2.0, 50.0, 1000.0]]


def test_the_time_to_a_loss_leaves_the_steps_on_a_free_link_out(bench):
    speed = sys.modules["_stella_speed"]
    record = phase_record(speed, [[1.0] * 3, [0.5] * 20], losses=[1.0] * 5 + [0.0] * 18)
    assert speed.to_target(record, 1) == {"steps_to_target": 14, "seconds_to_target": pytest.approx(11 * 0.5)}
    assert speed.to_target(phase_record(speed, [[1.0] * 30], [1.0] * 30), 0)["steps_to_target"] is None
