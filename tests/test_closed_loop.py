"""A small part of ``benchmarks/closed_loop.py``: bounds that hold in every run, on clusters of exactly known speed.

No process, no clock: a decision is charged a fixed time, so that the same looks happen on every machine.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.perf_model import PerfModelPlanner

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _clusters as clusters
import closed_loop as benchmark

DECISION = 0.003
"""Seconds that a decision is charged."""


@pytest.fixture(autouse=True)
def _charged(monkeypatch):
    monkeypatch.setattr(benchmark, "simulator", partial(clusters.simulator, cost=DECISION))


def run(kind, cluster, noise="2 %", regime="compute", policy="perf_model", seed=0, **more):
    case = {"kind": kind, "policy": policy, "cluster": cluster, "workload": "ResNet50", "regime": regime}
    return benchmark.run({**case, "noise": noise, "seed": seed, "total": None, **more})


@pytest.mark.parametrize("regime", ["communication", "mixed", "compute"])
@pytest.mark.parametrize("cluster", ["A", "B", "C"])
def test_steady_workers_get_the_optimum(cluster, regime):
    found = run("steady", cluster, regime=regime)
    assert found["share"] >= 0.99
    assert found["to 5 %"] <= 20
    assert found["to 1 %"] <= 40


@pytest.mark.parametrize(("cluster", "seed"), [("B", 1), ("100", 0), ("100", 1)])
def test_a_split_that_is_one_percent_off_is_mended_while_the_run_is_young(cluster, seed):
    """These were 1.1 % off after two looks, and the better split, worth 0.3 %, was kept back for 24 to 40 steps."""
    found = run("steady", cluster, regime="mixed", seed=seed)
    assert found["to 1 %"] <= 40
    assert found["changes"] <= 5


@pytest.mark.parametrize("noise", ["0 %", "8 %", "15 %", "2 % spikes"])
@pytest.mark.parametrize("cluster", ["A", "C", "100"])
def test_noise_costs_little_and_moves_little(cluster, noise):
    found = run("steady", cluster, noise)
    assert found["share"] >= (0.95 if noise == "15 %" else 0.97)
    assert found["changes"] <= (4 if noise in ("0 %", "8 %") else 8)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16, 32, 100])
@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_never_change(workers, seed):
    found = run("steady", (1.0,) * workers, "15 %", "equal", seed=seed, total=64 * workers)
    assert found["changes"] == 0


@pytest.mark.parametrize("kind", ["ramp 2.2", "walk", "swing"])
@pytest.mark.parametrize("cluster", ["A", "B", "C"])
def test_speeds_that_move_are_followed_and_no_harm_is_left(cluster, kind):
    """The former estimator ended such runs at 0.1 to 0.6 of the optimum, and stayed there."""
    found = run(kind, cluster, seed=1)
    assert found["moving share"] >= 0.93
    assert found["share"] >= 0.97


@pytest.mark.parametrize("kind", ["walk", "swing"])
def test_a_hundred_workers_that_move_are_followed_as_well(kind):
    """By looks every four steps, and only while they move."""
    found = run(kind, "100")
    assert found["moving share"] >= 0.93
    assert found["share"] >= 0.98


def test_looks_come_twice_as_often_while_speeds_walk(monkeypatch):
    seen, after = [], SyncSchedule.after

    def noted(self, step, observations, cost, decision, *, ahead=0):
        following = after(self, step, observations, cost, decision, ahead=ahead)
        seen.append((step, decision.moving, following - step - (decision.proposal is not None)))
        return following

    monkeypatch.setattr(SyncSchedule, "after", noted)
    run("walk", "C")
    steady = [(moving, steps) for step, moving, steps in seen if step < benchmark.WARM]
    assert {moving for moving, _ in steady} == {False}
    assert min(steps for _, steps in steady) == 8
    found = [steps for step, moving, steps in seen if benchmark.WARM + 100 < step < benchmark.WARM + 1200 and moving]
    assert len(found) > 150
    assert np.median(found) == 4


@pytest.mark.parametrize(("kind", "most"), [("jump 1.3", 40), ("jump 3", 60), ("link 3", 40)])
@pytest.mark.parametrize("cluster", ["A", "B"])
def test_jumps_are_followed_there_and_back(cluster, kind, most):
    found = run(kind, cluster)
    assert found["for good 5 %"] <= most
    assert found["back for good 5 %"] <= most
    assert min(found["share"], found["back share"]) >= 0.97


@pytest.mark.parametrize("kind", ["leaves", "joins"])
def test_workers_come_and_go(kind):
    found = run(kind, "B")
    assert found["share"] >= 0.98
    assert found["begin"] >= 0.8  # the others keep what is known of them


@pytest.mark.parametrize("kind", ["steady", "walk", "jump 1.3"])
def test_no_worse_than_control_without_a_model(kind):
    ours, pid = (run(kind, "C", policy=policy) for policy in ("perf_model", "pid"))
    for name in ("share", "moving share", "back share"):
        if name in ours:
            assert ours[name] >= pid[name] - 0.01


def test_the_decision_changes_what_runs_next():
    cluster = clusters.job(clusters.CLUSTERS["A"])
    simulated = clusters.simulator(PerfModelPlanner(), cluster, 336, clusters.Noise(0.02), cost=DECISION)
    before = simulated.plan.local_batch_sizes
    exact = simulated.run(60).exact
    assert simulated.plan.local_batch_sizes != before
    assert exact[-1] < 0.6 * exact[0]


def test_truth_is_bounded_by_its_own_optimum():
    rng = np.random.default_rng(0)
    for name in ("A", "C"):
        cluster = clusters.job(clusters.CLUSTERS[name])
        for total in clusters.totals(cluster).values():
            simulated, best = clusters.simulator(None, cluster, total, clusters.Noise(0.0)), cluster.optimum(total)
            for _ in range(20):
                shares = rng.dirichlet(np.ones(cluster.workers))
                sizes = np.maximum(np.floor(shares * total), 1).astype(int)
                sizes[int(np.argmax(sizes))] += total - sizes.sum()
                assert simulated.time(BatchPlan(total, tuple(sizes.tolist()))) >= best * (1 - 1e-9)
