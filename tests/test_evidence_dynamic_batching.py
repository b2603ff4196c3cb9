"""Evidence on dynamic batching: its rows come from the committed results, and small runs go the same way."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_hetero import BatchPlan
from lightning_hetero.core import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from tests.warm.interpreter import warmed

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = BENCHMARKS / "results"


def loaded(folder, name, monkeypatch, *others):
    """A module of a folder of benchmarks, which finds its neighbours."""
    for path in (BENCHMARKS, folder):
        monkeypatch.syspath_prepend(str(path))
    found = []
    for one in (*others, name):
        spec = importlib.util.spec_from_file_location(one, folder / f"{one}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, one, module)
        spec.loader.exec_module(module)
        found.append(module)
    return found[-1]


@pytest.fixture
def evidence(monkeypatch):
    return loaded(BENCHMARKS / "evidence", "dynamic_batching", monkeypatch, "row")


@pytest.fixture
def papers(monkeypatch):
    return loaded(BENCHMARKS / "papers", "_dynamic_batching", monkeypatch, "_dynamic_batching_rule")


def result(name):
    return json.loads((RESULTS / f"dynamic_batching_{name}.json").read_text())


def test_every_row_says_what_we_find(evidence):
    assert len({row.result for row in evidence.ROWS if row.result}) == 6
    for row in evidence.ROWS:
        found = row.found()
        assert found.endswith(".")
        assert "nan" not in found
        assert "None" not in found
        assert (row.verdict == "open") == (row.command == "")


def test_results_are_small_and_say_what_they_ran_on(evidence):
    for name in {row.result for row in evidence.ROWS if row.result}:
        assert (RESULTS / name).stat().st_size < 100_000
        assert {"title", "hardware", "date", "rows"} <= set(json.loads((RESULTS / name).read_text()))


def test_no_policy_that_keeps_the_total_exceeds_the_best_split(evidence):
    for row in result("levels")["rows"] + result("mixed")["rows"]:
        for name in ("static", "pid", "pid open", "perf_model"):
            assert row[name] <= 1.03 * row["optimum"] <= 1.04 * row["bound"]
        if row["model"] != "linear regression":  # whose 500 steps take less than a few sync rounds
            assert row["perf_model late"] >= 0.95 * row["optimum"]


def test_the_rule_as_printed_moves_the_total_and_its_bounds_never_end(evidence):
    data = result("control")
    assert evidence.controlled(data, "as printed")["total"] > 1.1
    assert evidence.controlled(data, "as printed", dead_band=0.0)["total"] < 0.9
    assert evidence.controlled(data, "as printed", away=True)["total"] < 0.9
    assert {row["total"] for row in evidence.chosen(data, kind="pid")} == {1.0}


def test_a_dead_band_stops_the_oscillation_of_the_printed_rule_and_ours_needs_none(evidence):
    data = result("control")
    off, on = (evidence.controlled(data, "as printed", dead_band=band)["changes"] for band in (0.0, 0.05))
    assert off > 10 * on
    assert evidence.controlled(data, "pid", dead_band=0.0)["changes"] <= 4


@pytest.mark.parametrize(("level", "least"), [(2, 1.3), (10, 5.0)])
def test_a_small_seed_reproduces_the_gain_of_balance(papers, evidence, level, least):
    cores = papers.LEVELS[level]
    devices = [papers.server(count, "ResNet-50", jitter=0.03) for count in cores]
    found = {}
    for name in ("even", "static", "printed", "pid", "perf_model"):
        planner, every = papers.policies(cores)[name]
        found[name] = papers.simulate(devices, 192, planner, steps=80, seed=7, capacities=cores, every=every)
    for name in ("static", "pid", "perf_model"):
        assert least < found["even"].steady / found[name].steady < papers.bound(cores)
        assert found[name].total == 192
    assert found["printed"].total > 192


def test_the_printed_rule_is_the_equation(papers):
    sizes, times = (32, 32, 32), (0.3, 0.2, 0.1)
    row = np.array([times])
    zero = np.zeros_like(row)
    observations = StepObservations(np.array([sizes], float), row / 3, 2 * row / 3, zero, zero, zero, row)
    context, plan = PlanContext(96, ("a", "b", "c"), (1, 1, 1)), BatchPlan(96, sizes)
    proposal = papers.AsPrinted().decide(observations, plan, context).proposal
    assert proposal.plan.local_batch_sizes == tuple(round(32 * 0.2 / seconds) for seconds in times)
    assert proposal.plan.total_batch_size == 117
    kept = papers.AsPrinted(keeps_total=True).decide(observations, plan, context).proposal
    assert kept.plan.total_batch_size == 96


def test_the_commands_of_the_rows_are_there(evidence):
    script = BENCHMARKS / "papers" / "dynamic_batching.py"
    done = subprocess.run(warmed(sys.executable, script, "--help"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for command in {row.command for row in evidence.ROWS if row.command}:
        start, _, name = command.rpartition(" ")
        assert start == "python benchmarks/papers/dynamic_batching.py"
        assert name in done.stdout
