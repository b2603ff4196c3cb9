"""Two emulated nodes, with one core and half a core, on links of 100, 500 and 1000 Mbit/s (needs root).

At each rate, DDP and ``hetero_ddp`` train the same model one after the other, the latter with ``staleness=1``, with
block top-k, and with both. The step is compared with a step that is computing only: the median of what the slowest node
of that run computed, as the ranks observed it (of the run without delays, for DDP at equal sizes there is no such
number).

    python benchmarks/staleness.py            # all rates
    python benchmarks/staleness.py --quick    # a small model at one rate, to see that it runs
    python benchmarks/staleness.py --trace    # two processes of this machine, no root: the way of every bucket

With ``--trace``, the sums of two processes share a link that is emulated in the process, and layers that only wait
stand for computing. A table says when each bucket was ready, set out, and was there, with and without the rule that
delayed sums set out after the fresh ones of their step; times are from the first gradient of a step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from cluster import Cluster, ClusterError, Node
from hardware import write_table

HERE = Path(__file__).parent
RATES = (100.0, 500.0, 1000.0)
SHARES = (1.0, 0.5)
QUICK = ("--width", "64", "--depth", "2", "--batch", "64", "--steps", "30", "--bucket-mb", "0.01")


def trained(mbit, arguments):
    """Rows of all strategies on links of this rate."""
    with tempfile.TemporaryDirectory() as folder, Cluster([Node(share, mbit) for share in SHARES]) as cluster:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_staleness_workload.py"), "--out", str(out), *arguments]
        results = cluster.run(command, timeout=900, echo=False)
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.stdout[-2000:] + result.stderr[-3000:] for result in results))
        return json.loads(out.read_text())


def rows_of(mbit, rounds, arguments):
    """Medians over rounds, with the ratios that matter."""
    runs = [trained(mbit, arguments) for _ in range(rounds)]
    rows = []
    for same in zip(*runs, strict=True):
        row = {"mbit": mbit, "strategy": same[0]["strategy"]}
        for name in same[0]:
            values = [run[name] for run in same if run[name] is not None]
            if name != "strategy":
                row[name] = float(np.median(values)) if values else None
        rows.append(row)
    computing = next(row["compute_ms"] for row in rows if row["strategy"] == "hetero_ddp")
    for row in rows:
        row["over_compute"] = row["step_ms"] / computing
        row["speed_up_over_ddp"] = rows[0]["step_ms"] / row["step_ms"]
    return rows


def traced(mb_per_second):
    """Rows of both orders, from two processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_staleness_workload.py"), "--out", str(out), "--trace", mb_per_second]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        ranks = [
            subprocess.Popen(
                [*command, "--bucket-mb", "0.5", "--steps", "60", "--depth", "7", "--batch", "8"],
                env={**os.environ, **common, "RANK": str(r), "NODE_RANK": str(r)},
            )
            for r in range(2)
        ]
        if any(rank.wait(600) for rank in ranks):
            raise SystemExit("a rank failed")
        return json.loads(out.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trace", nargs="?", const="100", metavar="MB/S", help="trace transfers on such a link")
    args = parser.parse_args()
    if args.trace:
        write_table(traced(args.trace), HERE / "results" / "staleness_trace.json", "transfers of gradient buckets")
        return
    try:
        if args.quick:
            rows = rows_of(RATES[0], 1, QUICK)
        else:
            rows = [row for mbit in RATES for row in rows_of(mbit, args.rounds, ())]
    except ClusterError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) if args.quick else HERE / "results"
        write_table(rows, target / "staleness.json", "delayed gradients on thin links")


if __name__ == "__main__":
    main()
