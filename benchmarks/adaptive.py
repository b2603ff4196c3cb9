"""Time to a target accuracy on three emulated nodes with 1.0, 0.5 and 0.3 of a core (needs root).

DDP, ``hetero_ddp`` with the total batch fixed, and ``hetero_ddp`` with ``AdaptiveBatchCallback``, all from the same
seeds, the same initial batch and learning rate. Seconds are those of training; the test accuracy is taken after each
epoch outside the clock. The digits are real data; the synthetic task says that it is. What the noise scale costs by
itself is measured in ``overhead.py``.

    python benchmarks/adaptive.py                     # three seeds of both tasks, about a quarter of an hour
    python benchmarks/adaptive.py --local --quick     # two equal workers, no root, few epochs: to see that it runs
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
SHARES = (1.0, 0.5, 0.3)
KINDS = ("ddp", "fixed", "adaptive")
SETTINGS = {
    "digits": ("--batch", "8", "--largest", "480", "--width", "256", "--lr", "0.02", "--epochs", "60"),
    "synthetic": ("--batch", "16", "--largest", "1536", "--width", "256", "--lr", "0.0015", "--epochs", "30"),
}


class Loopback:
    """Two workers on this machine, as they are; has what is used of a cluster."""

    def __enter__(self):
        self.port = 29840
        return self

    def __exit__(self, *error):
        return None

    def run(self, command, timeout, echo):
        self.port += 1
        launch = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [{**os.environ, **launch, "RANK": str(r), "NODE_RANK": str(r)} for r in range(2)]
        processes = [subprocess.Popen(command, env=env, **pipes) for env in ranks]
        outputs = [process.communicate(timeout=timeout) for process in processes]
        return [
            subprocess.CompletedProcess(command, process.returncode, *output)
            for process, output in zip(processes, outputs, strict=True)
        ]


def run(cluster, kind, task, seed, settings):
    """One training on the cluster; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_adaptive_workload.py"), "--kind", kind, "--task", task]
        command += ["--seed", str(seed), "--out", str(out), *settings]
        results = cluster.run(command, timeout=600, echo=False)
        if any(result.returncode for result in results):
            raise SystemExit("\n".join(result.stdout[-2000:] + result.stderr[-3000:] for result in results))
        return json.loads(out.read_text())


def table(cluster, task, seeds, epochs):
    """Rows of one task: medians over seeds; ratios are taken seed by seed."""
    done = {kind: [] for kind in KINDS}
    settings = [*SETTINGS[task], *(["--epochs", str(epochs)] if epochs else [])]
    for seed in range(seeds):
        for kind in KINDS:
            done[kind].append(run(cluster, kind, task, seed, settings))
            print(f"{task} {kind} seed {seed}: {done[kind][-1]['rows'][-1]}", file=sys.stderr, flush=True)
    rows = []
    for kind in KINDS:
        last = [result["rows"][-1] for result in done[kind]]
        ratios = [base["rows"][-1][0] / own[0] for base, own in zip(done["ddp"], last, strict=True)]
        rows.append(
            {
                "task": task,
                "strategy": kind,
                "target_%": 100 * done[kind][0]["target"],
                "reached": f"{sum(result['reached'] for result in done[kind])} of {seeds}",
                "seconds": float(np.median([row[0] for row in last])),
                "over_ddp": float(np.median(ratios)),
                "samples": int(np.median([row[2] for row in last])),
                "steps": int(np.median([row[3] for row in last])),
                "last_total": int(np.median([row[4] or 0 for row in last])),
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of each node's link")
    parser.add_argument("--task", choices=list(SETTINGS), help="only one of the tasks")
    parser.add_argument("--local", action="store_true", help="two workers on the loopback, with no limit and no root")
    parser.add_argument("--quick", action="store_true", help="one seed, three epochs, to see that it works")
    parser.add_argument(
        "--out", help="file of the table; by default the committed one, and none for --local or --quick"
    )
    args = parser.parse_args()
    tasks = [args.task] if args.task else list(SETTINGS)
    seeds, epochs = (1, 3) if args.quick else (args.seeds, None)
    try:
        nodes = Loopback() if args.local else Cluster([Node(cpu=share, mbit=args.mbit) for share in SHARES])
        with nodes as cluster:
            rows = [row for task in tasks for row in table(cluster, task, seeds, epochs)]
    except ClusterError as error:
        raise SystemExit(str(error)) from error
    committed = os.devnull if args.local or args.quick else HERE / "results" / "adaptive.json"
    where = "two equal workers" if args.local else f"three workers at {args.mbit:g} Mbit/s"
    write_table(rows, args.out or committed, f"time to accuracy, {where}")


if __name__ == "__main__":
    main()
