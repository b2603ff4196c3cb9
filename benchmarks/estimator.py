"""Sweep each setting of the estimator and of the decision rule: half and twice its default, in closed loop.

    estimator.py [--only walks,rounds] [--jobs 2] [--json FILE]

A setting whose figures hardly move is no tuning; one that moves them is at a good place if both neighbours are worse.
The steps of a round share nothing here, so that half of ``rounds`` does better; on a measured trace it splits back and
forth (``tests/equations/test_split_policy.py``).
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import closed_loop
import numpy as np
from hardware import write_record

from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.split_rule import RuleSettings
from lightning_hetero.core.timing.filters.time_posterior import TimePosterior
from lightning_hetero.core.timing.times import EstimatorSettings

CASES = [
    {"kind": kind, "policy": "perf_model", "cluster": cluster, "workload": "ResNet50", "regime": regime}
    | {"noise": noise, "seed": seed, "total": None}
    for kind, cluster, regime, noise in (
        *(("steady", cluster, "mixed", noise) for cluster in "ABC" for noise in ("2 %", "8 %")),
        *(("steady", cluster, "compute", noise) for cluster in "ABC" for noise in ("2 %", "8 %")),
        ("steady", "100", "compute", "8 %"),
        *(("walk", cluster, "compute", "2 %") for cluster in "AC"),
        *(("jump 1.3", cluster, "compute", "8 %") for cluster in "AC"),
        ("swing", "B", "compute", "8 %"),
    )
    for seed in range(2)
]  # fmt: skip
EQUAL = [
    {"kind": "steady", "policy": "perf_model", "cluster": (1.0,) * workers, "workload": "ResNet50", "regime": "equal"}
    | {"noise": "15 %", "seed": seed, "total": 64 * workers}
    for workers in (8, 32)
    for seed in range(3)
]


def variants() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, settings of the estimator, settings of the rule."""
    yield "defaults", {}, {}
    for which, (whose, settings) in enumerate((("", EstimatorSettings()), ("rule: ", RuleSettings()))):
        for field in fields(settings):
            value = getattr(settings, field.name)
            for factor in (0.5, 2.0):
                sign = "x"
                if field.name == "prior":  # only ratios count: flatter, and steeper
                    sign, scaled = "^", tuple(x**factor for x in value)
                elif isinstance(value, tuple):
                    scaled = tuple(factor * x for x in value)
                else:
                    scaled = type(value)(factor * value)
                change = {field.name: scaled}
                yield f"{whose}{field.name} {sign} {factor}", *((change, {}) if which == 0 else ({}, change))


def run(task: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """One case with these settings."""
    estimator, rule, case = task

    def planner() -> PerfModelPlanner:
        times = TimePosterior(settings=EstimatorSettings(**estimator))
        return PerfModelPlanner(times=times, settings=RuleSettings(**rule))

    closed_loop.POLICIES["perf_model"] = planner
    return closed_loop.run(case)


def figures(results: list[dict[str, Any]], equal: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the cases."""

    def of(name: str, part: list[dict[str, Any]]) -> float:
        values = [r[name] for r in part if name in r]
        return float(np.mean(np.minimum(values, closed_loop.STEADY)))

    steady = [r for r in results if r["kind"] == "steady"]
    return {
        "share": of("share", results),
        "moving share": of("moving share", results),
        "to 5 %": of("to 5 %", results),
        "to 1 %": of("to 1 %", steady),
        "changes": of("changes", steady),
        "changes of equal workers": of("changes", equal),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default="", help="settings, by commas")
    args = parser.parse_args()
    found = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, estimator, rule in variants():
            if args.only and name.removeprefix("rule: ").split()[0] not in args.only.split(","):
                continue
            tasks = [(estimator, rule, case) for case in (*CASES, *EQUAL)]
            results = list(pool.map(run, tasks, chunksize=4))
            found[name] = figures(results[: len(CASES)], results[len(CASES) :])
            cells = " | ".join(f"{key} {value:.4g}" for key, value in found[name].items())
            sys.stdout.write(f"{name:<24} | {cells}\n")
            sys.stdout.flush()
    if args.json:
        rows = [{"setting": name, **row} for name, row in found.items()]
        write_record(rows, args.json, "means over the cases, of each setting at half and at twice its default")


if __name__ == "__main__":
    main()
