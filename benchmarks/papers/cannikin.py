"""Figures and tables of Cannikin's evaluation, by the real planners on clusters of exactly known speed.

    python benchmarks/papers/cannikin.py all             # everything: about twenty minutes
    python benchmarks/papers/cannikin.py reach training  # some of it
    python benchmarks/papers/cannikin.py all --quick     # one seed, to see that it works

Devices, links and workloads: ``_cannikin_clusters.py``. Results go to ``benchmarks/results/cannikin_*.json``, and from
there to the page of evidence (``benchmarks/evidence/cannikin.py``).
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from _cannikin_clusters import (
    GBITS,
    NOISE,
    WORKLOADS,
    DelayedFirstBucket,
    PrintedCannikin,
    algorithm_1,
    cluster,
    even_time,
    lb_bsp_best,
    model_of,
    per_sample,
    predicted_times,
    published_fit,
    scaled,
    totals_of,
    truth_of,
)
from _cannikin_training import fixed, systems, train
from _clusters import EXCHANGE, LBBSP, Cluster, Noise, simulator
from hardware import write_record

from lightning_hetero.core.batching.goodput import candidate_totals, step_times
from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.noise.estimators import METHODS
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import PlanContext, Planner
from lightning_hetero.simulate import ClusterSimulator, LinkProfile
from lightning_hetero.simulate.devices.catalog import cluster_devices, workload_named

RESULTS = Path(__file__).resolve().parents[1] / "results"
EPOCH = 40
"""Steps that stand for an epoch: a planner sees the last 32 of any number."""
DECISION = 0.005
"""Seconds that a decision is charged, so that runs are the same on every machine."""
SETTINGS = [(10.0, "same"), (25.0, "same"), (25.0, "scaled"), (100.0, "scaled")]
"""Links and fixed times: from what hides most of the differences between workers to what shows most of them."""
Row = dict[str, Any]


def digits(value: Any, count: int = 4) -> Any:
    """The value with so many significant digits, lists and all."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return [digits(item, count) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.{count}g}")
    return value


def spread(work: Callable[[Any], Any], cases: Iterable[Any], jobs: int) -> list[Any]:
    """Do the cases in some processes."""
    cases = list(cases)
    if jobs < 2:
        return [work(case) for case in cases]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(work, cases))


def simulated(
    planner: Planner | None, truth: Cluster, total: int, seed: int, *, noise: Noise | None = None, **more: Any
) -> ClusterSimulator:
    """A run with :data:`NOISE`, or a noise that is given, the same on every machine."""
    noise = Noise(NOISE, seed=seed) if noise is None else noise
    return simulator(planner, truth, total, noise, cost=DECISION, **more)


# Fig. 10, and cluster C


def of_totals(case: tuple[str, str, float, str, int]) -> Row:
    """Step times over the totals of a workload: the optimum, equal sizes, LB-BSP at its best and after a change."""
    name, workload, gbit, fixed_times, seeds = case
    truth = cluster(name, workload, gbit, fixed_times)
    totals = totals_of(workload, truth.workers, 8)
    widest, found = totals[-1] - totals[0], []
    for total in totals:
        best, even, (lb, _) = truth.optimum(total), even_time(truth, total), lb_bsp_best(truth, total)
        before = int(total - 0.1 * widest)  # the total grew by a tenth of the range
        changed = lb if before < truth.workers else truth.time(scaled(lb_bsp_best(truth, before)[1], total))
        row = {"seconds": best, "over_even": 1 - best / even, "over_lb_bsp": 1 - best / lb}
        row["over_lb_bsp_changed"] = 1 - best / changed
        if seeds and total >= 2 * truth.workers:
            row["learned"] = min(learned(truth, total, seed) for seed in range(seeds))
        found.append(row)
    columns = {key: [row.get(key) for row in found] for key in {key: 0 for row in found for key in row}}
    where = {"cluster": name, "workload": workload, "gbit": gbit, "fixed": fixed_times}
    return {**where, "totals": totals, **digits(columns)}


def learned(truth: Cluster, total: int, seed: int, steps: int = 200) -> float:
    """Share of the optimum of the split that the time model ends with."""
    return simulated(PerfModelPlanner(), truth, total, seed).run(steps).share_since(steps - 1)


def ratios(case: tuple[int, float]) -> float:
    """Largest gain over LB-BSP on cluster B with coefficients off by random factors, each device kind its own."""
    seed, most = case
    rng, kinds = np.random.default_rng(seed), np.repeat([0, 1, 2], [4, 4, 8])
    gain = 0.0
    for workload in WORKLOADS:
        truth = cluster("B", workload, float(rng.choice(GBITS)))
        factors = [np.exp(rng.uniform(-np.log(most), np.log(most), 3))[kinds] for _ in range(4)]
        truth = Cluster.of(*(truth.coefficients * factors), truth.link)
        for total in totals_of(workload, 16, 6):
            gain = max(gain, 1 - truth.optimum(total) / lb_bsp_best(truth, total, (5,))[0])
    return gain


def limit(v100: float) -> float:
    """Share of DDP's time that the best split of cluster B saves where only seconds per sample count."""
    speeds = np.repeat([3.42, v100, 1.0], [4, 4, 8])
    return float(1 - 16 * speeds.min() / speeds.sum())


def batch_time(quick: bool, jobs: int) -> list[Row]:
    """Fig. 10: step time over the total batch, clusters A, B and C."""
    main = (25.0, "same")
    cases = [
        (name, workload, *setting, (1 if quick else 2) * (setting == main))
        for name, workload, setting in itertools.product("ABC", WORKLOADS, [main] if quick else SETTINGS)
    ]
    rows = [{"kind": "totals", **row} for row in spread(of_totals, cases, jobs)]
    for most in (1.0, 1.5, 2.0, 3.0):
        gains = spread(ratios, [(seed, most) for seed in range(2 if quick else 20)], jobs)
        row = {"kind": "other ratios", "factor": most, "draws": len(gains)}
        rows.append({**row, **digits({"median": float(np.median(gains)), "most": max(gains)})})
    table = per_sample("RTX6000", "resnet50-imagenet") / per_sample("V100", "resnet50-imagenet")
    for v100 in (table, 2.0, 3.09, 3.42):
        rows.append({"kind": "limit", "v100_over_rtx6000": digits(v100, 3), "over_even": digits(limit(v100))})
    return [{key: digits(value) for key, value in row.items()} for row in rows]


# Fig. 9


PLANNERS: dict[str, tuple[Callable[[], Any], int | str]] = {
    "ours": (PerfModelPlanner, "auto"),
    "ours, once an epoch": (PerfModelPlanner, EPOCH),
    "as printed, once an epoch": (PrintedCannikin, EPOCH),
    **{f"LB-BSP, step {step}, once an epoch": (partial(LBBSP, step=step), EPOCH) for step in (1, 2, 5, 10, 20)},
    **{f"LB-BSP, step {step}, as often as ours": (partial(LBBSP, step=step), "auto") for step in (1, 2, 5, 10, 20)},
}
"""Planner, and when it looks."""


def reach_one(case: tuple[str, str, int, str, int]) -> Row:
    """How soon a planner is within 5 and 1 % of the optimum, from equal sizes."""
    name, workload, total, system, seed = case
    make, when = PLANNERS[system]
    result = simulated(make(), cluster(name, workload), total, seed, replan=when).run(30 * EPOCH)
    found = {f"to {share} %": result.first_within(share / 100) for share in (5, 1)}
    if when != "auto":  # plans change between epochs only
        found = {key: steps / EPOCH + 1 for key, steps in found.items()}
    found["share"] = float(np.mean((result.optimum / result.exact)[-5 * EPOCH :]))
    return found


def reach(quick: bool, jobs: int) -> list[Row]:
    """Fig. 9: from equal sizes to the optimum; epochs (the first is 1), or steps of a planner that does not wait."""
    jobs_of = [("A", "ResNet-50", 128), ("B", "ResNet-50", 1600), ("C", "ResNet-50", 1600)]
    seeds, rows = range(1 if quick else 4), []
    for job, system in itertools.product(jobs_of, PLANNERS):
        runs = spread(reach_one, [(*job, system, seed) for seed in seeds], jobs)
        row: Row = dict(zip(("cluster", "workload", "total"), job, strict=True)) | {"system": system}
        row["unit"] = "steps" if PLANNERS[system][1] == "auto" else "epochs"
        for key in ("to 5 %", "to 1 %"):
            values = [run[key] for run in runs]
            row[key], row[f"{key}, worst"] = float(np.median(values)), max(values)
        rows.append({**row, "share": digits(float(np.median([run["share"] for run in runs])))})
    return rows


def emulated(quick: bool, jobs: int) -> list[Row]:
    """Fig. 9 end to end: three processes on emulated devices of cluster A, through Lightning and gloo."""
    truth, rows = replace(cluster("A", "ResNet-50"), link=LinkProfile()), []
    for system, steps, seed in [(s, n, i) for i in range(1 if quick else 3) for s, n in (("ours", 100), ("DDP", 40))]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run.json"
            script = Path(__file__).resolve().parent / "_cannikin_emulated.py"
            subprocess.run([sys.executable, script, system, str(seed), str(steps), file], check=True, timeout=600)
            run = json.loads(file.read_text())
        total = 3 * 43
        sizes = [even_sizes(total, 3)] * steps
        for first, plan in run["plans"]:
            sizes[first:] = [tuple(plan)] * (steps - first)
        lost = np.array([truth.time(b) for b in sizes]) / truth.optimum(total) - 1
        row = {"system": system, "seed": seed, "steps": steps, "changes": max(len(run["plans"]) - 1, 0)}
        for share in (5, 1):
            row[f"to {share} %"] = next((step for step, x in enumerate(lost) if x <= share / 100), np.inf)
        row["share"] = 1 / (1 + lost[-1])
        measured = float(np.median(np.diff(run["ends"])[-30:]))
        row |= {"seconds": measured, "seconds of the optimum": truth.optimum(total), "sizes": list(sizes[-1])}
        rows.append({key: digits(value) for key, value in row.items()})
    return rows


# sec. 5.3


def prediction_one(case: tuple[str, float, str, float, int]) -> dict[str, float]:
    """Largest error of predicted step times of optimal splits over a tenfold range of totals, on cluster A."""
    workload, gbit, fixed_times, delay, seed = case
    truth = cluster("A", workload, gbit, fixed_times)
    low, high = max(WORKLOADS[workload].initial, 6), WORKLOADS[workload].largest
    middle = int(np.sqrt(low * high))
    totals = [int(middle * factor) for factor in np.geomspace(10**-0.5, 10**0.5, 7)]
    measured = []
    for total in totals:
        run = simulated(None, truth, total, 1000 + seed)
        run.adopt(BatchPlan(total, tuple(truth.best(total)[1].tolist())))
        measured.append(float(run.run(300).seconds.mean()))

    def begun(planner: Planner, replan: str | int) -> ClusterSimulator:
        """The paper's first two epochs."""
        noise = DelayedFirstBucket(NOISE, delay, seed=seed)
        run = simulated(planner, truth, middle, seed, noise=noise, replan=replan)
        run.advance(2 * EPOCH)
        return run

    found, seen = {}, begun(PrintedCannikin(), EPOCH).planner.seen
    for name, options in {
        "plain averages": {"weighted": False, "least": False},
        "overlap averaged": {"weighted": False, "least": True},
        "as printed": {"weighted": True, "least": True},
    }.items():
        found[name] = np.max(np.abs(predicted_times(published_fit(seen, **options), totals) / measured - 1))
    run = begun(PerfModelPlanner(), "auto")
    run.sync_round()  # however long the schedule would wait
    found["ours, as many steps"] = _off(run, totals, measured)
    run.adopt(planned(run, 2 * middle))  # as a run whose total moves: a second one was seen
    run.advance(2 * EPOCH)
    run.sync_round()
    found["ours, a second total seen"] = _off(run, totals, measured)
    return {name: float(value) for name, value in found.items()}


def planned(run: ClusterSimulator, total: int) -> BatchPlan:
    """The optimum of what was learned, for another total, with its predicted time."""
    names = run.cluster.names
    return run.planner.initial(PlanContext(total, names, (1,) * len(names))).plan


def _off(run: ClusterSimulator, totals: Sequence[int], measured: Sequence[float]) -> float:
    return max(
        abs(planned(run, total).step_time / seconds - 1) for total, seconds in zip(totals, measured, strict=True)
    )


def prediction(quick: bool, jobs: int) -> list[Row]:
    """Sec. 5.3: error of predicted OptPerf, with and without inverse-variance weighting."""
    rows, seeds = [], range(1 if quick else 2)
    delays = (0.0, 0.3) if quick else (0.0, 0.1, 0.3, 1.0)
    for workload, delay in itertools.product(WORKLOADS, delays):
        settings = [(25.0, "same")] if quick else SETTINGS
        runs = spread(
            prediction_one, [(workload, *setting, delay, seed) for setting in settings for seed in seeds], jobs
        )
        row: Row = {"workload": workload, "delay": delay, "runs": len(runs)}
        for name in runs[0]:
            values = [run[name] for run in runs]
            row[name], row[f"{name}, most"] = digits(float(np.median(values)), 3), digits(max(values), 3)
        rows.append(row)
    return rows


# Table 6


EPOCH_SAMPLES = {"NeuMF": 4_970_000}
"""Samples of an epoch that the table lacks: a million ratings of MovieLens, each with four negative ones."""


def overhead(quick: bool, jobs: int) -> list[Row]:
    """Table 6: seconds of looks and decisions on cluster B, over those of training."""
    rows = []
    for workload, job in WORKLOADS.items():
        truth = cluster("B", workload)
        samples = EPOCH_SAMPLES.get(workload) or workload_named(job.name).samples
        row: Row = {"workload": workload}
        for name, total in (("at B_0", max(job.initial, 16)), ("at the largest total", job.largest)):
            result = simulator(PerfModelPlanner(), truth, total, Noise(NOISE, seed=0)).run(100 if quick else 2000)
            row[f"rounds, {name}"] = sum(one.seconds for one in result.rounds) / result.exact.sum()
            epoch = samples / total * truth.optimum(total)
            row[f"epoch, {name}"] = epoch
        model, windows = model_of(truth), [(total, 1) for total in candidate_totals(max(job.initial, 16), job.largest)]
        row["candidates"] = len(windows)
        row["all candidates, ms"] = _ms(lambda m=model, w=windows: step_times(m, w, (1,) * 16, None))
        planner, first = systems(job, truth)["ours"]
        record = train(job, truth, planner, first, 0)
        decision = (record.overhead - EXCHANGE * record.looks) / record.looks
        row |= {"decision, ms": 1e3 * decision, "looks": record.looks, "training": record.overhead / record.seconds}
        row["once an epoch, at the largest total"] = (decision + EXCHANGE) / row["epoch, at the largest total"]
        rows.append({key: digits(value, 3) for key, value in row.items()})
    return rows


def _ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median processor time of a call."""
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return 1e3 * float(np.median(taken))


# Fig. 5 to 8


def training_one(case: tuple[str, float, str, str, int]) -> dict[str, Any]:
    """One training of one system."""
    workload, gbit, fixed_times, system, seed = case
    job, truth = WORKLOADS[workload], cluster("B", workload, gbit, fixed_times)
    planner, total = systems(job, truth)[system]
    record = train(job, truth, planner, total, seed)
    grid = np.linspace(0, 1, 21)[:-1]
    progress, totals = (np.array([entry[i] for entry in record.history]) for i in (0, 1))
    at = np.maximum(np.searchsorted(progress, grid, side="right") - 1, 0)
    return {"seconds": record.seconds, "total": total, "totals": totals[at].tolist(), "history": record.history}


def training(quick: bool, jobs: int) -> list[Row]:
    """Fig. 7 and 8: time of whole trainings on cluster B; Fig. 5 and 6: total and split while they run.

    Of the seeds, the slowest run of ours and the fastest of the others count.
    """
    seeds, rows = range(1 if quick else 2), []  # one of LB-BSP, which does not see the noise scale
    for workload, (gbit, fixed_times) in itertools.product(WORKLOADS, SETTINGS[1:2] if quick else SETTINGS):
        job, truth = WORKLOADS[workload], cluster("B", workload, gbit, fixed_times)
        names = list(systems(job, truth))
        cases = [
            (workload, gbit, fixed_times, name, seed) for name in names for seed in seeds[: 1 if "LB" in name else None]
        ]
        runs = dict(zip(cases, spread(training_one, cases, jobs), strict=True))
        row: Row = {"kind": "training", "workload": workload, "gbit": gbit, "fixed": fixed_times}
        row["seconds"] = {name: total_seconds for name, (_, total_seconds) in fixed(job, truth).items()}
        of = {name: [runs[case] for case in cases if case[3] == name] for name in names}
        row["seconds"] |= {name: min(run["seconds"] for run in found) for name, found in of.items()}
        row["seconds"]["ours"] = max(run["seconds"] for run in of["ours"])
        ours = row["seconds"]["ours"]
        row["spread"] = max(run["seconds"] for run in of["ours"]) / min(run["seconds"] for run in of["ours"]) - 1
        row["saved"] = {name: digits(1 - ours / seconds, 3) for name, seconds in row["seconds"].items()}
        row["seconds"] = {name: digits(seconds) for name, seconds in row["seconds"].items()}
        row["totals"] = {"DDP": fixed(job, truth)["DDP at its best total"][0]}
        row["totals"]["LB-BSP"] = of["LB-BSP at its best total, step 5"][0]["total"]
        row["larger"] = float(np.mean(
            [a >= b for i in seeds for a, b in zip(of["ours"][i]["totals"], of["AdaptDL"][i]["totals"], strict=True)]
        ))  # fmt: skip
        rows.append({**row, "spread": digits(row["spread"], 2), "larger": digits(row["larger"], 3)})
        if (gbit, fixed_times) == (25.0, "same"):
            rows.append(_course(workload, truth, of["ours"][0]["history"], of["AdaptDL"][0]["totals"]))
    return rows


def _course(workload: str, truth: Cluster, history: list[Any], even: list[int]) -> Row:
    """Total and split of one training at 20 moments."""
    devices, grid = cluster_devices("B"), np.linspace(0, 1, 21)[:-1]
    progress = np.array([entry[0] for entry in history])
    at = np.maximum(np.searchsorted(progress, grid, side="right") - 1, 0)
    course: Row = {"kind": "course", "workload": workload, "progress": digits(grid, 2)}
    course["totals"], course["totals of AdaptDL"] = [int(history[i][1]) for i in at], even
    for kind in ("A100", "V100", "RTX6000"):
        of_kind = [i for i, device in enumerate(devices) if device == kind]
        course[f"share of a {kind}"] = digits(
            [np.mean([history[i][2][j] for j in of_kind]) / history[i][1] for i in at], 3
        )
    course["workers that computing bounds"] = [int(truth.computes(history[i][2]).sum()) for i in at]
    course["share of the optimum"] = digits([history[i][4] / history[i][3] for i in at])
    return course


# sec. 6


def heterogeneity(quick: bool, jobs: int) -> list[Row]:
    """Sec. 6: two workers, one ``N`` times as fast; equal workers."""
    rows = []
    for ratio, fixed_share in itertools.product((1.0, 1.5, 2.0, 3.42, 4.0, 8.0, 16.0), (0.0, 0.2)):
        base = 4e-3  # seconds per sample of the slow one
        sample, fixed_time = np.array([base / ratio, base]), np.full(2, fixed_share * base * 256)
        link = LinkProfile(latency=1e-3, buckets=2)
        truth = Cluster.of(sample / 3, fixed_time / 3, sample * 2 / 3, fixed_time * 2 / 3, link)
        total, row = 512, {"ratio": ratio, "fixed": fixed_share, "bound": 2 / (ratio + 1)}
        found = []
        for seed in range(1 if quick else 8):
            result = simulated(PerfModelPlanner(), truth, total, seed).run(300)
            found.append((float(result.exact[-1]), len(result.plans) - 1))
        even = even_time(truth, total)
        row |= {"optimum": truth.optimum(total) / even, "ours": float(np.median([t for t, _ in found])) / even}
        rows.append(
            {**digits_of(row), "worst": digits(max(t for t, _ in found) / even), "changes": max(c for _, c in found)}
        )
    return rows


def digits_of(row: Row) -> Row:
    """The row with four digits of each number."""
    return {key: digits(value) for key, value in row.items()}


EVENTS = {
    "B loses four RTX6000": ("B", list(range(12)), list(range(16))),
    "B loses its four A100": ("B", list(range(4, 16)), list(range(16))),
    "B gets four RTX6000 more": ("B", list(range(16)), list(range(12))),
    "B gets its four A100": ("B", list(range(16)), list(range(4, 16))),
    "A loses its fastest worker": ("A", [1, 2], [0, 1, 2]),
    "A gets its fastest worker": ("A", [0, 1, 2], [1, 2]),
    "C loses half of its workers": ("C", list(range(0, 16, 2)), list(range(16))),
    "C gets half of its workers": ("C", list(range(16)), list(range(0, 16, 2))),
}
"""Cluster, workers afterwards, workers before."""


def workers_one(case: tuple[str, int]) -> dict[str, float]:
    """Steps after a change of the workers until within 5 and 1 % of the new optimum, and the first step's share."""
    event, seed = case
    name, after, before = EVENTS[event]
    devices, total = cluster_devices(name), 128 if name == "A" else 1600
    names = [f"{device} {i}" for i, device in enumerate(devices)]

    def some(which: Sequence[int]) -> Cluster:
        return truth_of([devices[i] for i in which], "ResNet-50")

    run, since = simulated(PerfModelPlanner(), some(before), total, seed, names=[names[i] for i in before]), 200
    run.advance(since)
    truth = some(after)
    run.change_workers(truth.devices, [names[i] for i in after])
    result = run.run(400)
    return {
        "first": result.optimum[since] / result.exact[since],
        "even": truth.optimum(total) / even_time(truth, total),
        "to 5 %": result.first_within(0.05, since=since),
        "to 1 %": result.first_within(0.01, since=since),
        "share": result.share_since(since + 300),
    }


def workers(quick: bool, jobs: int) -> list[Row]:
    """Sec. 6 (long version): workers leave and join."""
    seeds, rows = range(1 if quick else 8), []
    for event in EVENTS:
        runs = spread(workers_one, [(event, seed) for seed in seeds], jobs)
        row: Row = {"event": event}
        for key in runs[0]:
            values = [run[key] for run in runs]
            worst = max(values) if key.startswith("to") else min(values)
            row[key], row[f"{key}, worst"] = digits(float(np.median(values))), digits(worst)
        rows.append(row)
    return rows


# Theorem 4.1


def splits() -> dict[str, np.ndarray]:
    """Sizes of workers: the best splits of the paper's clusters, and some others."""
    found = {"8 equal workers": np.full(8, 32.0)}
    for name, total in (("A", 128), ("B", 400), ("B", 3200), ("C", 1600)):
        found[f"{name}, {total}"] = cluster(name, "ResNet-50").best(total)[1].astype(float)
    return {**found, "two workers, 4 to 1": np.array([80.0, 20.0])}


def noise_scale(quick: bool, jobs: int) -> list[Row]:
    """Theorem 4.1: the printed weights and covariances, against Monte-Carlo."""
    rows = []
    for (name, b), ratio in itertools.product(splits().items(), (0.1, 1.0, 10.0)):
        rng, draws, dims = np.random.default_rng(0), 2000 if quick else 20_000, 64
        total, n = b.sum(), len(b)
        signal = np.zeros(dims)
        signal[0] = 1.0
        trace = ratio * total  # noise scale over total batch, with |G|^2 = 1
        own, mean = np.empty((draws, n)), np.zeros((draws, dims))
        for i, size in enumerate(b):
            gradient = signal + np.sqrt(trace / dims / size) * rng.standard_normal((draws, dims))
            own[:, i], mean = (gradient**2).sum(axis=1), mean + gradient * size / total
        whole = (mean**2).sum(axis=1)
        of_g = (total * whole[:, None] - b * own) / (total - b)
        of_s = b * total / (total - b) * (own - whole[:, None])
        row: Row = {"split": name, "workers": n, "noise scale over total": ratio}
        for method, rule in METHODS.items():
            w_g, w_s = rule(b)
            row[method] = {
                "trace": digits(float((of_s @ w_s).std() / trace), 3),
                "signal": digits(float((of_g @ w_g).std()), 3),
                "bias": digits(float((of_s @ w_s).mean() / trace - 1), 2),
                "negative": int((w_g < -1e-9).sum() + (w_s < -1e-9).sum()),
            }
        printed = 4 * trace * total * b / (total - b)  # Lemma B.1 of S_i, with |G|^2 = 1
        row["printed variance over true"] = digits([float(x) for x in np.sort(printed / of_s.var(axis=0))[[0, -1]]], 3)
        pairs = [(i, j) for i, j in itertools.combinations(range(n), 2)]
        i, j = min(pairs, key=lambda pair: abs(b[pair[0]] - b[pair[1]]) - 1e-6 * b[pair[0]])
        row["true correlation"] = digits(float(np.corrcoef(of_s[:, i], of_s[:, j])[0, 1]), 2)
        lemma = 4 * trace * b[i] * b[j] * (total - b[i] - b[j]) / ((total - b[i]) * (total - b[j]))
        row["printed correlation"] = digits(float(lemma / np.sqrt(printed[i] * printed[j])), 2)
        rows.append(row)
    return rows


# Algorithm 1


def algorithm(quick: bool, jobs: int) -> list[Row]:
    """Algorithm 1: how often its sizes are negative, no boundary fits, or rounding misses the total."""
    rows = []
    for name, (gbit, fixed_times) in itertools.product("ABC", SETTINGS):
        cases = [
            (cluster(name, workload, gbit, fixed_times), total)
            for workload in WORKLOADS
            for total in totals_of(workload, cluster(name, workload).workers, 8 if quick else 40)
        ]
        rows.append({"cluster": name, "gbit": gbit, "fixed": fixed_times, **_judged(cases)})
    rng, cases = np.random.default_rng(0), []
    for _ in range(100 if quick else 2000):
        n = int(rng.integers(2, 17))
        sample = 1e-3 * np.exp(rng.uniform(-1.2, 1.2, n))
        fixed_time = rng.uniform(0, 0.1, n)
        share = rng.uniform(0.2, 0.5, n)
        link = LinkProfile(latency=rng.uniform(0, 0.1) / 5, buckets=6)
        times = (share * sample, share * fixed_time, (1 - share) * sample, (1 - share) * fixed_time)
        cases.append((Cluster.of(*times, link), int(rng.integers(4, 65)) * n))
    rows.append({"cluster": "random", "gbit": None, "fixed": "to 100 ms, each its own", **_judged(cases)})
    return rows


def _judged(cases: Sequence[tuple[Cluster, int]]) -> Row:
    counts = {"cases": 0, "negative": 0, "no boundary": 0, "sum off": 0, "slower": 0}
    worst = 0.0
    for truth, total in cases:
        found = algorithm_1(model_of(truth), total)
        whole = np.round(found.sizes)
        counts["cases"] += 1
        counts["negative"] += bool((found.sizes < 0).any())
        counts["no boundary"] += not found.found
        counts["sum off"] += bool(whole.sum() != total)
        if not (found.sizes < 0).any():
            lost = truth.time(np.maximum(found.sizes, 0)) / predicted_times(model_of(truth), [total])[0] - 1
            counts["slower"] += bool(lost > 1e-6)
            worst = max(worst, float(lost))
    return {**counts, "slower by most": digits(worst, 3)}


PARTS: dict[str, tuple[Callable[[bool, int], list[Row]], str]] = {
    "batch_time": (batch_time, "step time over the total batch: what the optimum saves of DDP's and LB-BSP's"),
    "reach": (reach, "epochs (the first is 1) or steps from equal sizes to within 5 and 1 % of the optimum"),
    "emulated": (emulated, "ResNet-50 on emulated devices of cluster A, total batch 129: steps, and seconds of a step"),
    "prediction": (prediction, "largest error of the predicted optimum over a tenfold range of totals, cluster A"),
    "overhead": (overhead, "seconds of sync rounds and decisions over those of training, cluster B"),
    "training": (training, "seconds of trainings on cluster B, and what the time model with goodput saves of them"),
    "heterogeneity": (heterogeneity, "two workers, one some times as fast: time over that of equal sizes"),
    "workers": (workers, "workers leave and join: steps until the optimum of those that are there"),
    "noise_scale": (noise_scale, "standard deviation of estimates over their mean, Monte-Carlo"),
    "algorithm": (algorithm, "Algorithm 1 as printed: cases in which its sizes cannot be used"),
}
"""Sub-commands: what makes their rows, and the title of the record."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["all", *PARTS])
    parser.add_argument("--quick", action="store_true", help="one seed, few settings")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    for name in PARTS if "all" in args.parts else args.parts:
        begin = time.perf_counter()
        make, title = PARTS[name]
        rows = make(args.quick, args.jobs)
        write_record(rows, args.out / f"cannikin_{name}.json", title)
        print(f"{name}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
