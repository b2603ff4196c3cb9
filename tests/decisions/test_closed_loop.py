"""A small part of ``benchmarks/closed_loop.py``: bounds that hold in every run, on clusters of exactly known speed.

No process, no clock: a decision is charged a fixed time, so that the same looks happen on every machine.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.perf_model import PerfModelPlanner

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _clusters as clusters
import closed_loop as benchmark

DECISION = 0.003
"""Seconds that a decision is charged."""


@pytest.fixture(autouse=True)
def _charged(monkeypatch):
    monkeypatch.setattr(benchmark, "simulator", partial(clusters.simulator, cost=DECISION))


def run(kind, cluster, noise="2 %", regime="compute", policy="perf_model", seed=0, total=None):
    case = {"kind": kind, "policy": policy, "cluster": cluster, "workload": "ResNet50", "regime": regime}
    return benchmark.run({**case, "noise": noise, "seed": seed, "total": total})


more = partial(pytest.param, marks=pytest.mark.slow("another cluster, link or noise of the same kind"))
LEAST, MOST = "at least", "at most"
STEADY = {"share": (LEAST, 0.99), "to 5 %": (MOST, 20), "to 1 %": (MOST, 40)}
YOUNG = {"to 1 %": (MOST, 40), "changes": (MOST, 5)}
NOISY = {"share": (LEAST, 0.97), "changes": (MOST, 4)}
NOISIER = {"share": (LEAST, 0.95), "changes": (MOST, 8)}
MOVING = {"moving share": (LEAST, 0.93), "share": (LEAST, 0.97)}
COMES = {"share": (LEAST, 0.98), "begin": (LEAST, 0.8)}  # the others keep what is known of them


def jump(most):
    good = dict.fromkeys(("for good 5 %", "back for good 5 %"), (MOST, most))
    return {**good, "share": (LEAST, 0.97), "back share": (LEAST, 0.97)}


CASES = [
    ({"kind": "steady", "cluster": "A", "regime": "compute"}, STEADY),
    ({"kind": "steady", "cluster": "B", "regime": "mixed"}, STEADY),
    ({"kind": "steady", "cluster": "C", "regime": "communication"}, STEADY),
    # these were 1.1 % off after two looks, and the better split, worth 0.3 %, was kept back for 24 to 40 steps
    ({"kind": "steady", "cluster": "B", "regime": "mixed", "seed": 1}, YOUNG),
    ({"kind": "steady", "cluster": "C", "noise": "0 %"}, NOISY),
    ({"kind": "steady", "cluster": "A", "noise": "8 %"}, NOISY),
    ({"kind": "steady", "cluster": "A", "noise": "15 %"}, NOISIER),
    ({"kind": "steady", "cluster": "C", "noise": "2 % spikes"}, {**NOISY, "changes": (MOST, 8)}),
    *(({"kind": kind, "cluster": "B", "seed": 1}, MOVING) for kind in ("ramp 2.2", "walk")),
    ({"kind": "jump 1.3", "cluster": "A"}, jump(40)),
    ({"kind": "jump 3", "cluster": "B"}, jump(60)),
    ({"kind": "link 3", "cluster": "A"}, jump(40)),
    *(({"kind": kind, "cluster": "B"}, COMES) for kind in ("leaves", "joins")),
]
OTHERS = [
    *(
        ({"kind": "steady", "cluster": c, "regime": r}, STEADY)
        for c in "ABC"
        for r in ("communication", "mixed", "compute")
    ),
    *(({"kind": "steady", "cluster": "100", "regime": "mixed", "seed": seed}, YOUNG) for seed in (0, 1)),
    *(({"kind": "steady", "cluster": c, "noise": "8 %"}, NOISY) for c in ("C", "100")),
    *(({"kind": "steady", "cluster": c, "noise": "15 %"}, NOISIER) for c in ("C", "100")),
    *(({"kind": kind, "cluster": c, "seed": 1}, MOVING) for c in "AC" for kind in ("ramp 2.2", "walk", "swing")),
    ({"kind": "swing", "cluster": "B", "seed": 1}, MOVING),
    *(({"kind": kind, "cluster": "100"}, MOVING) for kind in ("walk", "swing")),
    *(({"kind": kind, "cluster": c}, jump(60)) for c in "AB" for kind in ("jump 1.3", "jump 3", "link 3")),
]


@pytest.mark.parametrize(("case", "bounds"), [*CASES, *(more(*row) for row in OTHERS)], ids=str)
def test_a_split_is_found_kept_and_followed(case, bounds):
    found = run(**case)
    for name, (which, bound) in bounds.items():
        assert found[name] >= bound if which == LEAST else found[name] <= bound, (name, found[name])


@pytest.mark.parametrize("workers", [2, 4, 16, more(3), more(8), more(32), more(100)])
def test_equal_workers_never_change(workers, seed):
    found = run("steady", (1.0,) * workers, "15 %", "equal", seed=seed, total=64 * workers)
    assert found["changes"] == 0


@pytest.mark.parametrize("kind", ["jump 1.3", more("steady"), more("walk")])
def test_no_worse_than_control_without_a_model(kind):
    ours, pid = (run(kind, "C", policy=policy) for policy in ("perf_model", "pid"))
    for name in {"share", "moving share", "back share"} & ours.keys():
        assert ours[name] >= pid[name] - 0.01


def test_the_decision_changes_what_runs_next():
    cluster = clusters.job(clusters.CLUSTERS["A"])
    simulated = clusters.simulator(PerfModelPlanner(), cluster, 336, clusters.Noise(0.02), cost=DECISION)
    before = simulated.plan.local_batch_sizes
    exact = simulated.run(60).exact
    assert simulated.plan.local_batch_sizes != before
    assert exact[-1] < 0.6 * exact[0]


@pytest.mark.parametrize("name", ["A", "C"])
def test_truth_is_bounded_by_its_own_optimum(name, seed):
    rng, cluster = np.random.default_rng(seed), clusters.job(clusters.CLUSTERS[name])
    for total in clusters.totals(cluster).values():
        simulated, best = clusters.simulator(None, cluster, total, clusters.Noise(0.0)), cluster.optimum(total)
        for _ in range(10):
            sizes = np.maximum(np.floor(rng.dirichlet(np.ones(cluster.workers)) * total), 1).astype(int)
            sizes[int(np.argmax(sizes))] += total - sizes.sum()
            assert simulated.time(BatchPlan(total, tuple(sizes.tolist()))) >= best * (1 - 1e-9)
