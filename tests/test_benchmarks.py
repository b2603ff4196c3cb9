"""Benchmarks run by hand. Here, they import, and a small part of each paper's evidence comes out again."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_hetero import BatchPlan, solve_optperf
from lightning_hetero.core import StepObservations
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.simulate import LinkProfile

FOLDER = Path(__file__).parents[1] / "benchmarks"
EVIDENCE = pytest.mark.slow("evidence changes with a benchmark, not with a change of the package")


@pytest.mark.slow("imports all benchmarks in two interpreters")
def test_every_benchmark_finds_what_it_imports():
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    for folder in (FOLDER, FOLDER / "papers"):
        names = sorted(path.stem for path in folder.glob("*.py"))
        assert names
        done = subprocess.run(
            [sys.executable, "-c", code, *names],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def script(monkeypatch):
    """Load a script of ``benchmarks/papers`` by its name; what its import changes is as before afterwards."""
    threads, variables, modules = torch.get_num_threads(), dict(os.environ), set(sys.modules)

    def load(name, folder="papers"):
        for path in (FOLDER, FOLDER / folder):
            monkeypatch.syspath_prepend(str(path))
        spec = importlib.util.spec_from_file_location(name, FOLDER / folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(variables)
    for name in set(sys.modules) - modules:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


# C: Cannikin


@EVIDENCE
def test_cannikin_algorithm_1_is_the_optimum_where_fixed_times_are_equal_and_negative_where_they_are_not(script):
    clusters, devices = script("_cannikin_clusters"), script("_clusters", "")
    model = clusters.model_of(clusters.cluster("B", "ResNet-50"))
    for total in (200, 1600, 12_800):
        found = clusters.algorithm_1(model, total)
        assert np.abs(found.sizes - solve_optperf(model, total).local_batch_sizes).max() <= 1.0
    equal, fixed = np.ones(2), np.array([0.0, 1.0])
    truth = devices.Cluster.of(0.001 * equal, fixed, 0.002 * equal, 0 * equal, LinkProfile())
    found = clusters.algorithm_1(clusters.model_of(truth), 64)
    assert found.sizes.min() < 0
    assert found.sizes.sum() == pytest.approx(64)


@EVIDENCE
def test_cannikin_gains_are_those_of_the_rows(script):
    cannikin = script("cannikin")
    assert cannikin.limit(1.377) == pytest.approx(0.41, abs=0.005)
    found = cannikin.of_totals(("B", "ResNet-50", 25.0, "same", 0))
    assert 0.3 < max(found["over_even"]) < 0.42
    assert max(found["over_lb_bsp"]) < 0.05
    assert cannikin.reach_one(("A", "ResNet-50", 128, "ours, once an epoch", 0))["to 1 %"] <= 3


# D: dynamic batching


@EVIDENCE
@pytest.mark.parametrize(("level", "least"), [(2, 1.3), (10, 5.0)])
def test_dynamic_batching_gains_grow_with_the_level_of_heterogeneity(script, level, least):
    script("_dynamic_batching_rule")
    papers = script("_dynamic_batching")
    cores = papers.LEVELS[level]
    devices, found = [papers.server(count, "ResNet-50", jitter=0.03) for count in cores], {}
    for name in ("even", "static", "printed", "pid", "perf_model"):
        planner, every = papers.policies(cores)[name]
        found[name] = papers.simulate(devices, 192, planner, steps=80, seed=7, capacities=cores, every=every)
    for name in ("static", "pid", "perf_model"):
        assert least < found["even"].steady / found[name].steady < papers.bound(cores)
        assert found[name].total == 192
    assert found["printed"].total > 192


@EVIDENCE
def test_dynamic_batching_as_printed_is_the_equation_and_moves_the_total(script):
    script("_dynamic_batching_rule")
    papers = script("_dynamic_batching")
    sizes, times = (32, 32, 32), (0.3, 0.2, 0.1)
    row = np.array([times])
    zero = np.zeros_like(row)
    observations = StepObservations(np.array([sizes], float), row / 3, 2 * row / 3, zero, zero, zero, row)
    context, plan = PlanContext(96, ("a", "b", "c"), (1, 1, 1)), BatchPlan(96, sizes)
    proposal = papers.AsPrinted().decide(observations, plan, context).proposal
    assert proposal.plan.local_batch_sizes == tuple(round(32 * 0.2 / seconds) for seconds in times)
    assert proposal.plan.total_batch_size == 117


# A: Adaptive SGD


@EVIDENCE
def test_adaptive_sgd_replays_take_every_sample_once_and_faster_workers_take_more(script):
    bench = script("adaptive_sgd")
    trained = {
        method: bench.replay(bench.spec("amazon", "unequal", method, "SGD", 1.0, 0), epochs, quick=True)
        for method, epochs in {"elastic": 1, "elastic, even": 1, "adaptive": 4, "ddp": 6}.items()
    }
    record = trained["elastic"]
    assert record["points"][-1][0] == 1500
    updates = [sum(merge[1][rank] for merge in record["merges"]) for rank in range(3)]
    assert updates[0] > updates[1] > updates[2] > 0
    assert trained["elastic, even"]["points"][-1][1] > 1.1 * record["points"][-1][1]
    sizes, updates, _, _ = trained["adaptive"]["merges"][-1]
    assert sizes[0] > sizes[1] > sizes[2]
    assert max(updates) - min(updates) <= 2
    balanced = bench.balanced(trained["ddp"], quick=True)
    assert [p[3] for p in balanced["points"]] == [p[3] for p in trained["ddp"]["points"]]
    assert balanced["points"][-1][1] < 0.9 * trained["ddp"]["points"][-1][1]


# S: StellaTrain


@EVIDENCE
def test_stellatrain_tables_and_the_small_task(script):
    script("stellatrain")
    tables, task = sys.modules["_stella_tables"], sys.modules["_stella_task"]
    for times in ([0.3, 0.3], [0.1, 0.5, 0.2]):
        assert tables.printed_radicand(times) < 0 <= tables.variation(times)
    assert min(row["mbit"] for row in tables.needed_rates()) > 10 * tables.WAN_MBIT
    dense = task.losses(task.Training(), 2240)
    assert dense[-1] < dense[0]
    assert task.losses(task.Training("exact", 1.0), 2240) == pytest.approx(dense, rel=1e-3)
    assert task.losses(task.Training(delay=1, fresh=1.0), 2240) == pytest.approx(dense, rel=1e-3)


# what is committed


def test_results_are_small_and_say_on_what_they_were_measured():
    for path in (FOLDER / "results").glob("*.json"):
        if path.stem.startswith(("cannikin", "dynamic_batching", "adaptive_sgd", "stellatrain")):
            assert path.stat().st_size < 100_000
            assert {"title", "hardware", "date", "rows"} <= set(json.loads(path.read_text()))
