"""Balanced against equal batches on three emulated nodes with 1.0, 0.5 and 0.3 of a core (needs root).

Each round: DDP, PerfModel and PID train one after the other; then one more run interleaves, in short stretches, the
even split, the splits that the policies arrived at, and fixed splits around them. The fastest of all these is the exact
optimum. Ratios are taken within that interleaved run, where all splits see the same machine, and within each cycle of
it. The same split differs by a tenth from cycle to cycle, so the fastest of ten is partly the luckiest: it is chosen by
every other cycle and timed in those between, and the reverse. What the time model of a policy's own run says of each
worker, at its split and at the optimum, stands beside them: it tells whose time is wrong.

A second table compares predicted with measured step times over a 10x range of total batches: the planner learns from
every other total and predicts the ones between.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from cluster import Cluster, ClusterError, Node
from hardware import write_table

from lightning_hetero import BatchPlan, ClusterTimeModel
from lightning_hetero.core import StepObservations
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.base import PlanContext
from lightning_hetero.core.timing.winsorized_mean import winsorized_mean

HERE = Path(__file__).parent
SHARES = (1.0, 0.5, 0.3)
BATCH = 64
CYCLES = 10
# A step has to be long against the 4 ms in which a CPU quota is handed out (a node that idles for most of a period runs
# the rest of it at full speed, whatever its share), and its activations small enough for the caches that nodes share.
MODEL = ("--width", "96", "--size", "12")


def run(cluster, kind, steps, *, script=None):
    """One training run on the cluster; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_workload.py"), "--kind", kind, "--steps", str(steps), "--out", str(out)]
        command += ["--batch", str(BATCH), "--script", json.dumps(script or {}), *MODEL]
        if script:
            command += ["--samples", str((steps + 60) * max(sum(sizes) for sizes in script.values()))]
        results = cluster.run(command, timeout=400, echo=False)
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.stdout[-2000:] + result.stderr[-3000:] for result in results))
        return json.loads(out.read_text())


def times_of_splits(cluster, splits, *, cycles, stretch=8):
    """Mean step time of each fixed split in each cycle of one run that goes round them, shape ``(cycles, splits)``."""
    order = list(splits) * cycles
    script = {i * stretch: list(split) for i, split in enumerate(order)}
    seconds = np.array(run(cluster, "script", stretch * len(order), script=script)["seconds"])
    means = [winsorized_mean(seconds[i * stretch + 3 : (i + 1) * stretch]) for i in range(len(order))]
    return np.array(means).reshape(cycles, len(splits))


def fastest(times):
    """The fastest split, and its time over that of each split, by cycles that had no part in the choice."""
    times = times / times.mean(axis=1, keepdims=True)  # the machine is slower in one cycle than in another
    halves = [times[half::2].mean(axis=0) for half in (0, 1)]
    shares = [after[before.argmin()] / after for before, after in (halves, halves[::-1])]
    return int(times.mean(axis=0).argmin()), np.mean(shares, axis=0)


def settled(seconds):
    """Mean of the second half."""
    return winsorized_mean(np.array(seconds[len(seconds) // 2 :]))


def steps_until_near(history, optimum, time_of_split, tolerance=0.05):
    """First step from which on every split is within 5 % of the optimum, by the run's own fitted model."""
    reached = 0
    for index, (_, _, sizes, _, _) in enumerate(history):
        if time_of_split(sizes) > (1 + tolerance) * time_of_split(optimum):
            reached = history[index + 1][1] if index + 1 < len(history) else float("nan")
    return reached


def observed(data):
    """Observations of a run as arrays; rows are per step and rank."""
    return StepObservations(**{name: np.array(values) for name, values in data["observations"].items()})


def neighbours(split, step):
    """The split itself and those that move ``step`` samples between two workers."""
    n = len(split)
    moves = [(i, j) for i in range(n) for j in range(n) if i != j]
    moved = [tuple(b - step * (k == i) + step * (k == j) for k, b in enumerate(split)) for i, j in moves]
    return [tuple(split), *(m for m in moved if min(m) > 0)]


def balance(cluster):
    """One round; rows of DDP, the optimum and the policies."""
    even = (BATCH,) * len(SHARES)
    runs = {kind: run(cluster, kind, 40 if kind == "ddp" else 100) for kind in ("ddp", "perf_model", "pid")}
    arrived = {kind: tuple(runs[kind]["history"][-1][2]) for kind in ("perf_model", "pid")}
    around = neighbours(arrived["perf_model"], 10)
    center = around[times_of_splits(cluster, around, cycles=4).mean(axis=0).argmin()]
    compared = list(dict.fromkeys([even, *arrived.values(), center, *neighbours(center, 5)]))
    times = times_of_splits(cluster, compared, cycles=CYCLES)
    best, shares = fastest(times)
    mean, optimum = times.mean(axis=0), compared[best]
    rows = []
    for name, split in (("ddp", even), ("exact optimum", optimum), *arrived.items()):
        at = compared.index(split)
        row = {"strategy": name, "split": "/".join(map(str, split)), "step_ms": mean[at] * 1e3}
        row["over_even"] = mean[compared.index(even)] / mean[at]
        row["share_of_optimum_%"] = 100.0 if name == "exact optimum" else 100 * shares[at]
        if name in runs:
            row["own_run_ms"] = settled(runs[name]["seconds"]) * 1e3
            row["own_run_over_ddp"] = settled(runs["ddp"]["seconds"]) * 1e3 / row["own_run_ms"]
        if name in arrived:
            model = ClusterTimeModel.fit(observed(runs[name]))
            for column, at in (("its_workers_ms", split), ("its_workers_at_optimum_ms", optimum)):
                row[column] = "/".join(f"{1e3 * seconds:.0f}" for seconds in model.finish_times(at))
            row["plans"] = len(runs[name]["history"])
            row["steps_to_5%"] = steps_until_near(runs[name]["history"], optimum, model.step_time)
        rows.append(row)
    return rows


def context_of(total):
    """What the planner is told of a step of ``total`` samples."""
    return PlanContext(int(total), tuple(map(str, range(len(SHARES)))), (1,) * len(SHARES))


def prediction(cluster, *, cycles=3, stretch=24):
    """Relative error of predicted mean step times at totals that the model has not seen, over a 10x range.

    Means, because under a quota single steps are bursts and waits, of which a median is either the one or the other.
    """
    totals = [36, 54, 81, 120, 180, 260, 360]
    split_of = {t: (t - round(t * 0.28) - round(t * 0.17), round(t * 0.28), round(t * 0.17)) for t in totals}
    order = totals * cycles
    script = {i * stretch: list(split_of[t]) for i, t in enumerate(order)}
    done = run(cluster, "script", stretch * len(order), script=script)
    rows, seconds = observed(done), np.array(done["seconds"])
    measured = {t: [] for t in totals}
    for i, t in enumerate(order):
        measured[t] += seconds[i * stretch + 3 : (i + 1) * stretch].tolist()
    measured = {t: winsorized_mean(np.array(values)) for t, values in measured.items()}
    planner, learned, fields = PerfModelPlanner(), totals[::2], StepObservations.FIELDS
    ran = rows.local_batch_sizes.sum(axis=1)
    for window in np.split(np.arange(len(ran)), np.flatnonzero(np.diff(ran)) + 1):
        if ran[window[0]] in learned:
            seen = StepObservations(*(getattr(rows, name)[window] for name in fields))
            planner = planner.observe(seen, context_of(ran[window[0]]))
    table = []
    for t in totals:
        predicted = planner.predict(BatchPlan(t, split_of[t]), context_of(t))
        used = "learned from" if t in learned else "predicted"
        row = {"total": t, "used": used, "measured_ms": measured[t] * 1e3, "predicted_ms": predicted * 1e3}
        table.append({**row, "error_%": 100 * abs(predicted - measured[t]) / measured[t]})
    return table


def medians(rounds, key):
    """Rows of all rounds in one, with the median of each number."""
    out = []
    for rows in zip(*rounds, strict=True):
        merged = dict(rows[-1])
        for name, value in rows[0].items():
            if isinstance(value, int | float) and name != key:
                merged[name] = float(np.nanmedian([row[name] for row in rows]))
        out.append(merged)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("balance", "prediction"))
    args = parser.parse_args()
    try:
        with Cluster([Node(share, 1000) for share in SHARES]) as cluster:
            if args.only != "prediction":
                rows = medians([balance(cluster) for _ in range(args.rounds)], "strategy")
                write_table(rows, HERE / "results" / "contention.json", f"contention, {args.rounds} rounds, medians")
            if args.only != "balance":
                rows = medians([prediction(cluster) for _ in range(args.rounds)], "total")
                errors = [row["error_%"] for row in rows if row["used"] == "predicted"]
                title = f"prediction over 10x: median {np.median(errors):.1f} %, largest {max(errors):.1f} %"
                write_table(rows, HERE / "results" / "contention_prediction.json", title)
    except ClusterError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
