"""Elastic averaging against gradient averaging on sparse, irregular data, on an emulated cluster (needs root).

Three results: the training time until a precision is reached, for every merge rule, `hetero_ddp` and `ddp`, on equal
and on unequal workers (the paper's Fig. 4); how batch sizes move and how often weights are perturbed (Fig. 6); and the
time with more and more equal workers (Fig. 5). The data are synthetic, with the non-zeros of Amazon-670k or
Delicious-200k; the precision says nothing of the real sets. Evaluation does not count as time, in any of the runs.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from cluster import Cluster, ClusterError, Node
from hardware import write_table

HERE = Path(__file__).parent
SUBNET = "10.79.0"  # not that of the other benchmarks
CLUSTERS = {"equal": (0.6, 0.6, 0.6), "unequal": (1.0, 0.5, 0.3)}
KINDS = ("adaptive", "adaptive+printed", "elastic", "crossbow", "mean", "hetero_ddp", "ddp")
FULL = {"scale": 0.05, "classes": 500, "samples": 16000, "batch": 64, "mega-batch": 2000, "epochs": 8, "lr": 4.0}
QUICK = {"scale": 0.01, "classes": 60, "samples": 1200, "batch": 32, "mega-batch": 600, "epochs": 2, "lr": 4.0}


def run(cluster, kind, settings):
    """One training; the curve and merges that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_elastic_workload.py"), "--kind", kind, "--out", str(out)]
        command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        results = cluster.run(command, timeout=900, echo=False)
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.stdout[-2000:] + result.stderr[-3000:] for result in results))
        return json.loads(out.read_text())


def time_to(points, target):
    """Seconds of training until a precision is reached, ``None`` if it never is."""
    return next((seconds for seconds, precision in points if precision >= target), None)


def summary(name, kind, result, target):
    """One row: time to the target, end of the curve, and what the merges did."""
    points, merges = result["points"], result["merges"]
    row = {"workers": name, "training": kind, "target": target, "seconds_to_target": time_to(points, target)}
    row |= {"seconds": points[-1][0], "best_precision": max(precision for _, precision in points)}
    row["merges"] = len(merges)
    row["perturbed_%"] = 100 * statistics.mean(m[2] for m in merges) if merges else None
    row["last_sizes"] = "/".join(map(str, merges[-1][0])) if merges else None
    row["last_updates"] = "/".join(map(str, merges[-1][1])) if merges else None
    return row


def median(values):
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def merged(rounds):
    """Rows of all rounds in one, with the median of each number."""
    rows = []
    for same in zip(*rounds, strict=True):
        row = dict(same[-1])
        numbers = {name for name, value in same[0].items() if isinstance(value, int | float) or value is None}
        rows.append({name: median([r[name] for r in same]) if name in numbers else row[name] for name in row})
    return rows


def time_to_accuracy(kinds, settings, share):
    """All trainings on both clusters; the target is a share of the best precision of ``ddp`` on that cluster."""
    rows, evolution = [], []
    for name, speeds in CLUSTERS.items():
        with Cluster([Node(speed, 1000) for speed in speeds], subnet=SUBNET) as cluster:
            results = {kind: run(cluster, kind, settings) for kind in kinds}
        target = share * max(precision for _, precision in results["ddp"]["points"])
        rows += [summary(name, kind, result, target) for kind, result in results.items()]
        for index, (sizes, updates, perturbed, busy) in enumerate(results["adaptive"]["merges"]):
            idle = 1 - statistics.mean(busy) / max(busy)
            row = {"workers": name, "mega_batch": index, "sizes": "/".join(map(str, sizes))}
            row |= {"updates": "/".join(map(str, updates)), "perturbed": perturbed, "idle_%": 100 * idle}
            evolution.append(row)
    return rows, evolution


def scaling(counts, settings, target):
    """The adaptive rule on 1, 2, ... equal workers; the target is one that a single worker reaches."""
    rows, results = [], {}
    for count in counts:
        with Cluster([Node(0.5, 1000)] * count, subnet=SUBNET) as cluster:
            results[count] = run(cluster, "adaptive", settings)
    reached = target * max(precision for _, precision in results[counts[0]]["points"])
    for count, result in results.items():
        rows.append(summary(count, "adaptive", result, reached))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("time", "scaling"))
    parser.add_argument("--shape", choices=("amazon", "delicious"), default="amazon")
    parser.add_argument("--target", type=float, default=0.8, help="share of the best precision of the reference run")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the global model")
    parser.add_argument("--quick", action="store_true", help="one or two minutes; means nothing, writes nothing")
    args = parser.parse_args()
    settings = {**(QUICK if args.quick else FULL), "shape": args.shape, "momentum": args.momentum}
    kinds, counts = (("adaptive", "hetero_ddp", "ddp"), (1, 2)) if args.quick else (KINDS, (1, 2, 3, 4))
    rounds = 1 if args.quick else args.rounds
    folder = Path(tempfile.mkdtemp()) if args.quick else HERE / "results"
    title = f"{args.shape}, {rounds} rounds, medians"
    try:
        if args.only != "scaling":
            found = [time_to_accuracy(kinds, settings, args.target) for _ in range(rounds)]
            rows = merged([rows for rows, _ in found])
            write_table(rows, folder / "elastic.json", f"time to {args.target:.0%} of ddp's best precision, {title}")
            write_table(found[-1][1], folder / "elastic_sizes.json", f"batch sizes and perturbation, {args.shape}")
        if args.only != "time":
            rows = merged([scaling(counts, settings, args.target) for _ in range(rounds)])
            write_table(rows, folder / "elastic_scaling.json", f"adaptive, more equal workers of half a core, {title}")
    except ClusterError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
