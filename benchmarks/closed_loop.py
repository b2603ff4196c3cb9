"""Planners in closed loop with simulated clusters of exactly known speed, against the exact optimum of every step.

    closed_loop.py [--quick] [--only steady,ramp] [--policies perf_model,pid] [--first-seed 0] [--json FILE]

No processes and no clocks, but for the processor time of decisions, which delays the next look as in a run. Shares are
of the exact optimum: the least time of any integer split, over the time of the split that ran.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _families
import numpy as np
from _closed_total import Ramp, training
from _clusters import CLUSTERS, NOISES, POLICIES, Noise, job, simulator, totals
from hardware import write_record

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.simulate import ClusterSimulator, SimulationResult

FORMER = "perf_model before"
"""Policy of the rows of the record that no code here can make any more."""
WARM, STEADY = 150, 500
BLOCK = 8
"""Steps for which a speed that moves stands still."""
SHARED = {"A": 0, "B": 0, "C": 3, "100": 0, "1000": 0}
"""The worker whose speed jumps or ramps."""


def path_of(kind: str, workers: int, one: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Factors on all times, block by block."""
    on = np.arange(workers) == one
    if kind.startswith("ramp"):
        most = float(kind[5:])
        for j in range(60):
            yield np.where(on, most ** ((j + 1) / 60), 1.0)
    else:
        x = np.zeros(workers)
        for j in range(150):
            if kind == "walk":  # of a standard deviation of 0.2 in the long run
                x = 0.98 * x + 0.04 * rng.standard_normal(workers)
            else:
                x = 0.25 * np.sin(2 * np.pi * (j / 60 + np.arange(workers) / workers))
            yield np.exp(x)


def measure(result: SimulationResult, since: int) -> dict[str, float]:
    """Figures of the steps since one of them."""
    seconds, best = result.exact[since:], result.optimum[since:]
    tail = -max(len(seconds) // 4, 1)
    return {
        "share": float(best[tail:].sum() / seconds[tail:].sum()),
        "mean share": result.share_since(since),
        "begin": float(best[0] / seconds[0]),
        "to 5 %": result.first_within(0.05, since=since),
        "to 1 %": result.first_within(0.01, since=since),
        "for good 5 %": result.first_within(0.05, since=since, for_good=True),
        "for good 1 %": result.first_within(0.01, since=since, for_good=True),
        "changes": changes(result, since),
    }


def changes(result: SimulationResult, since: int) -> int:
    """Changes of the plan since a step, those by a restart left out."""
    decided = {round_.step for round_ in result.rounds}
    return sum(entry.step >= since and entry.step in decided for entry in result.plans)


def adaptive(case: dict[str, Any]) -> dict[str, Any]:
    """A short training whose total follows the gradient noise, on workers that may move."""
    plan, one = training(CLUSTERS[case["cluster"]], case["workload"]), SHARED[case["cluster"]]
    workers = plan.cluster.workers
    path = [*path_of("walk", workers, one, np.random.default_rng(case["seed"]))]

    def movement(progress: float, step: int) -> np.ndarray:
        if case["kind"] == "total walks":
            return path[step // BLOCK % len(path)]
        slower = case["kind"] == "total jumps" and 0.4 <= progress < 0.7
        return np.where((np.arange(workers) == one) & slower, 1.6, 1.0)

    noise = Noise(**NOISES[case["noise"]], seed=case["seed"])
    return {**case, **Ramp(plan, noise, GoodputPlanner(plan.largest), movement, case["seed"]).run()}


def prediction(case: dict[str, Any]) -> dict[str, Any]:
    """Steps at totals of a tenfold range around the one that was learned at, against what was predicted of them."""
    cluster, noise = job(CLUSTERS[case["cluster"]], case["workload"]), Noise(**NOISES[case["noise"]], seed=case["seed"])
    total = totals(cluster)[case["regime"]]
    run = simulator(POLICIES["perf_model"](), cluster, total, noise)

    def planned(number: int) -> BatchPlan:
        """The optimum of what was learned, for another total, with its predicted time and the error of that."""
        return run.planner.initial(PlanContext(number, run.cluster.names, (1,) * cluster.workers)).plan

    run.advance(150)
    run.adopt(planned(2 * total))  # as a run whose total moves: a second one was seen
    run.advance(60)
    off, inside = [], []
    for factor in np.geomspace(10**-0.5, 10**0.5, 9):
        plan = planned(max(int(total * factor), cluster.workers))
        fixed = simulator(None, cluster, plan.total_batch_size, noise)
        fixed.adopt(plan)
        measured = float(fixed.run(64).seconds.mean())
        off.append(abs(plan.step_time / measured - 1.0))
        inside.append(abs(plan.step_time - measured) <= 2.0 * plan.step_time_error)
    return {**case, "off": float(np.median(off)), "worst off": float(np.max(off)), "inside": float(np.mean(inside))}


def family(case: dict[str, Any]) -> dict[str, Any]:
    """Devices, noise and speeds on which a planner that fits lines may fail."""
    return {**case, **_families.run(case["cluster"], FAMILY_POLICIES[case["policy"]](), case["seed"])}


FAMILY_POLICIES = {name: POLICIES[name] for name in ("perf_model", "pid", "even")} | {"one line": _families.OneLine}
SPECIAL = {"total": adaptive, "prediction": prediction, "family": family}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One run of one case."""
    if case["kind"].split()[0] in SPECIAL:
        return SPECIAL[case["kind"].split()[0]](case)
    known, kind = isinstance(case["cluster"], str), case["kind"]
    cluster = job(CLUSTERS[case["cluster"]] if known else case["cluster"], case["workload"])
    total = case["total"] or totals(cluster).get(case["regime"])
    if total is None:
        return {**case, "skipped": True}
    noise = Noise(**NOISES[case["noise"]], seed=case["seed"])
    simulated = simulator(POLICIES[case["policy"]](), cluster, total, noise)
    found = MOVEMENTS[kind.split()[0]](simulated, kind, SHARED[case["cluster"]] if known else 0, case["seed"])
    costs = [round_.decision_seconds for round_ in simulated.result.rounds]
    return {**case, "total": total, **found, **({"decision ms": 1e3 * float(np.median(costs))} if costs else {})}


def steady(simulated: ClusterSimulator, kind: str, one: int, seed: int) -> dict[str, float]:
    """Nothing moves."""
    return measure(simulated.run(STEADY), 0)


def jump(simulated: ClusterSimulator, kind: str, one: int, seed: int) -> dict[str, float]:
    """One worker, or the link, is slower by a factor all of a sudden, and later itself again."""
    simulated.advance(200 + 3 * seed)  # the change falls anywhere between two sync rounds
    (what, factor), found = kind.split(), {}
    on = np.arange(simulated.cluster.size) == one
    slower = (np.where(on, float(factor), 1.0), 1.0) if what == "jump" else (1.0, float(factor))
    for name, (workers, link) in (("", slower), ("back ", (1.0, 1.0))):
        since = simulated.step
        simulated.slow_down(workers, link=link)
        found |= {name + key: value for key, value in measure(simulated.run(300), since).items()}
    return found


def leaves(simulated: ClusterSimulator, kind: str, one: int, seed: int) -> dict[str, float]:
    """One worker leaves, and comes back."""
    if simulated.planner is None:
        return {}
    simulated.advance(200)
    devices, names, found = simulated.cluster.devices, simulated.cluster.names, {}
    for name, first in (("", 1), ("back ", 0)):
        since = simulated.step
        simulated.change_workers(devices[first:], names[first:])
        found |= {name + key: value for key, value in measure(simulated.run(300), since).items()}
    return found


def joins(simulated: ClusterSimulator, kind: str, one: int, seed: int) -> dict[str, float]:
    """A worker joins of which nothing is known."""
    if simulated.planner is None:
        return {}
    devices, names = simulated.cluster.devices, simulated.cluster.names
    simulated.change_workers(devices[1:], names[1:])
    simulated.advance(200)
    since = simulated.step
    simulated.change_workers(devices, names)
    return measure(simulated.run(300), since)


def moving(simulated: ClusterSimulator, kind: str, one: int, seed: int) -> dict[str, float]:
    """Speeds ramp, walk or swing, and are then what they were."""
    simulated.advance(WARM)
    since = simulated.step
    for factors in path_of(kind, simulated.cluster.size, one, np.random.default_rng(seed)):
        simulated.slow_down(factors)
        simulated.advance(BLOCK)
    result = simulated.result
    shares, changed = result.optimum[since:] / result.exact[since:], changes(result, since)
    simulated.slow_down(1.0)
    since = simulated.step
    return {"moving share": float(shares.mean()), "moving changes": changed, **measure(simulated.run(STEADY), since)}


def bursts(simulated: ClusterSimulator, kind: str, one: int, seed: int) -> dict[str, float]:
    """One worker is slower by a factor for some steps, again and again: another process, a stuck loader.

    Steps take a tenth of the workload's time, so that sync rounds are far apart, and a burst may end between two.
    """
    simulated.slow_down(0.1, link=0.1)
    simulated.advance(WARM)
    since, rng = simulated.step, np.random.default_rng(seed)
    slower = np.where(np.arange(simulated.cluster.size) == one, float(kind.split()[1]), 1.0) / 10
    for _ in range(20):
        for factors, longest in ((slower, 60), (0.1, 150)):
            simulated.slow_down(factors, link=0.1)
            simulated.advance(int(rng.integers(5, longest)))
    result = simulated.result
    seconds, best = result.exact[since:], result.optimum[since:]
    worst = {"worst step": float((seconds / best).max())}
    return {"moving share": float(best.sum() / seconds.sum()), "moving changes": changes(result, since), **worst}


MOVEMENTS = {
    "steady": steady,
    "jump": jump,
    "bursts": bursts,
    "link": jump,
    "leaves": leaves,
    "joins": joins,
    "ramp": moving,
    "walk": moving,
    "swing": moving,
}


def of_kind(kind: str, policies: Sequence[str]) -> list[str]:
    """Those of the policies that a kind is for, and for families the plain alternative as well."""
    if kind == "family":
        return [*(policy for policy in policies if policy in FAMILY_POLICIES), "one line"]
    return [policy for policy in policies if policy == "perf_model" or kind.split()[0] not in SPECIAL]


def cases(quick: bool, only: Sequence[str], policies: Sequence[str], first_seed: int = 0) -> list[dict[str, Any]]:
    """Every run."""
    found: list[dict[str, Any]] = []

    def add(kind: str, clusters: Sequence[Any], workloads: Sequence[str], regimes: Sequence[str], noises: Sequence[str],
            seeds: int, **more: Any) -> None:  # fmt: skip
        if only and not any(kind.startswith(name) for name in only):
            return
        for policy, cluster, workload, regime, noise, seed in itertools.product(
            of_kind(kind, policies),
            clusters,
            workloads,
            regimes,
            noises,
            range(first_seed, first_seed + (1 if quick else seeds)),
        ):
            found.append(
                {"kind": kind, "policy": policy, "cluster": cluster, "workload": workload, "regime": regime,
                 "noise": noise, "seed": seed, "total": None, **more}
            )  # fmt: skip

    every = ("communication", "mixed", "compute")
    add("steady", "ABC", ("ResNet50", "BERT"), every, tuple(NOISES), 4)
    add("steady", "ABC", ("ResNet18", "DeepSpeech2", "NeuMF"), every, ("2 %",), 2)
    add("steady", ["100"], ("ResNet50", "DeepSpeech2"), every, tuple(NOISES), 2)
    if not quick:
        add("steady", ["1000"], ("ResNet50",), ("compute",), ("2 %", "8 %"), 1)
    for workers in (2, 8, 16, 32, 100):
        add("steady", [(1.0,) * workers], ("ResNet50",), ("equal",), ("8 %", "15 %"), 6, total=64 * workers)
    for kind in ("ramp 1.3", "ramp 2.2", "walk", "swing"):
        add(kind, "ABC", ("ResNet50",), ("compute", "mixed"), ("2 %", "8 %"), 4)
        add(kind, ["100"], ("ResNet50",), ("compute",), ("2 %",), 1)
    for kind in ("jump 1.3", "jump 3", "link 3"):
        add(kind, "ABC", ("ResNet50",), every, ("2 %", "8 %"), 4)
        add(kind, ["100"], ("ResNet50",), ("compute",), ("2 %", "8 %"), 1)
    add("bursts 4", "ABC", ("ResNet50",), ("compute", "mixed"), ("2 %", "8 %"), 4)
    for kind in ("leaves", "joins"):
        add(kind, "ABC", ("ResNet50",), every, ("2 %", "8 %"), 3)
    add("family", [*_families.FAMILIES], ("",), ("",), ("",), 3)
    for movement in ("stands", "jumps", "walks"):
        add(f"total {movement}", "AB", ("NeuMF", "BERT", "ResNet50"), ("total",), ("2 %", "8 %"), 3)
    add("prediction", "ABC", ("ResNet50", "BERT"), every, ("2 %", "8 %"), 3)
    return found


def number(value: float) -> str:
    """A figure for the table."""
    return "never" if np.isinf(value) else f"{value:.3f}" if abs(value) < 2 and value != int(value) else f"{value:.0f}"


COLUMNS = (
    "decision ms",
    "time",
    "goodput",
    "goodput of total",
    "off",
    "worst off",
    "inside",
    "moving share",
    "worst step",
    "share",
    "speed",
    "to 5 %",
    "to 1 %",
    "for good 5 %",
    "changes",
    "back share",
    "back for good 5 %",
)


LARGE = ("share", "time", "goodput", "inside", "speed")
"""Parts of the names of figures of which the least is the worst."""


def summary(
    results: Sequence[dict[str, Any]], *, by: Sequence[str] = ("kind", "noise", "regime")
) -> list[dict[str, Any]]:
    """Median and worst of each figure over all runs of a kind, policy by policy."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        if not result.get("skipped"):
            size = result["cluster"] if isinstance(result["cluster"], str) else f"equal {len(result['cluster'])}"
            size = "A B C" if len(size) == 1 else size
            groups.setdefault((*(result[name] for name in by), size, result["policy"]), []).append(result)
    rows = []
    for key, runs in groups.items():
        figures: dict[str, tuple[float, float]] = {}
        for name in COLUMNS:
            values = np.array([r[name] for r in runs if name in r])
            if len(values):
                worst = values.min() if any(good in name for good in LARGE) else values.max()
                figures[name] = float(np.median(values)), float(worst)
        rows.append(dict(zip((*by, "workers", "policy"), key, strict=True)) | {"runs": len(runs), "figures": figures})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of figures: median and worst."""
    lines = []
    for row in rows:
        name = " ".join(str(value) for key, value in row.items() if key not in ("runs", "figures"))
        cells = [f"{key} {number(middle)} ({number(worst)})" for key, (middle, worst) in row["figures"].items()]
        lines.append(" | ".join([f"{name:<46}", f"{row['runs']:>3}", *cells]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of each case")
    parser.add_argument("--only", default="", help="kinds of movement, by commas")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--first-seed", type=int, default=0, help="other seeds than those of the record")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", default="", help="record; its rows of the former estimator are kept")
    parser.add_argument("--match", default="", help="key=value,...: only these cases")
    args = parser.parse_args()
    todo = cases(args.quick, [x for x in args.only.split(",") if x], args.policies.split(","), args.first_seed)
    for pair in filter(None, args.match.split(",")):
        name, value = pair.split("=")
        todo = [case for case in todo if str(case[name]) == value]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run, todo, chunksize=4))
    sys.stdout.write("\n".join(table(summary(results))) + "\n")
    if args.json:
        path, rows = Path(args.json), summary(results, by=("kind", "noise"))
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        rows += [row for row in kept if row["policy"] == FORMER]
        write_record(rows, path, f"median and worst of each figure over all runs; {FORMER}: the estimator of 0.1")


if __name__ == "__main__":
    main()
