"""A small part of ``benchmarks/closed_loop.py``: bounds that hold in every run, on clusters of exactly known speed.

No process, no clock: a decision is charged a fixed time, so that the same looks happen on every machine.
"""

import sys
from functools import partial
from pathlib import Path

import pytest

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


LEAST, MOST = "at least", "at most"
STEADY = {"share": (LEAST, 0.99), "to 5 %": (MOST, 20), "to 1 %": (MOST, 40)}
MOVING = {"moving share": (LEAST, 0.93), "share": (LEAST, 0.97)}
COMES = {"share": (LEAST, 0.98), "begin": (LEAST, 0.8)}  # the others keep what is known of them
JUMP = {**dict.fromkeys(("for good 5 %", "back for good 5 %"), (MOST, 40)), "back share": (LEAST, 0.97)}
CASES = [
    ({"kind": "steady", "cluster": "A"}, STEADY),
    ({"kind": "steady", "cluster": "C", "regime": "communication"}, STEADY),
    # these were 1.1 % off after two looks, and the better split, worth 0.3 %, was kept back for 24 to 40 steps
    ({"kind": "steady", "cluster": "B", "regime": "mixed", "seed": 1}, {"to 1 %": (MOST, 40), "changes": (MOST, 5)}),
    ({"kind": "steady", "cluster": "A", "noise": "15 %"}, {"share": (LEAST, 0.95), "changes": (MOST, 8)}),
    ({"kind": "steady", "cluster": "C", "noise": "2 % spikes"}, {"share": (LEAST, 0.97), "changes": (MOST, 8)}),
    *(({"kind": kind, "cluster": "B", "seed": 1}, MOVING) for kind in ("ramp 2.2", "walk")),
    *(({"kind": kind, "cluster": "A"}, JUMP) for kind in ("jump 1.3", "link 3")),
    *(({"kind": kind, "cluster": "B"}, COMES) for kind in ("leaves", "joins")),
]


@pytest.mark.parametrize(("case", "bounds"), CASES, ids=str)
def test_a_split_is_found_kept_and_followed(case, bounds):
    found = run(**case)
    for name, (which, bound) in bounds.items():
        assert found[name] >= bound if which == LEAST else found[name] <= bound, (name, found[name])


@pytest.mark.parametrize("workers", [2, 16])
def test_equal_workers_never_change(workers, seed):
    found = run("steady", (1.0,) * workers, "15 %", "equal", seed=seed, total=64 * workers)
    assert found["changes"] == 0
