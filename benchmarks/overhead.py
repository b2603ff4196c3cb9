"""What ``hetero_ddp`` costs where it cannot help: two equal local workers against plain DDP.

Both strategies take turns in the same two processes, a short training each, again and again, so that each pair sees the
same machine. The table shows the median over pairs of the ratio of their median step times, and its quartiles; a last
column compares plain DDP with itself in the same way, which shows how far the machine can tell.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from hardware import write_table

HERE = Path(__file__).parent
KINDS = ("ddp", "perf_model", "gns", "ddp")


def run(cycles, steps, batch, model, port):
    """Median step times of every short training, shape ``(cycles, kinds)``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_workload.py"), "--kind", ",".join(KINDS * cycles), "--out", str(out)]
        command += ["--steps", str(steps), "--batch", str(batch), *model]
        launch = {"NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **launch, "RANK": str(r), "LOCAL_RANK": str(r), "MASTER_PORT": str(port)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(2)
        ]
        errors = [rank.communicate(timeout=900)[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join(errors))
        seconds = [np.median(run["seconds"][20:]) for run in json.loads(out.read_text())]
        return np.array(seconds).reshape(cycles, len(KINDS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    rows = []
    for port, batch, size in ((29811, 64, 12), (29812, 128, 20)):
        times = run(args.cycles, args.steps, batch, ("--width", "32", "--size", str(size)), port)
        row = {"ddp_ms": float(np.median(times[:, 0])) * 1e3}
        for column, name in ((1, "hetero_ddp"), (2, "with_gns_each_step"), (3, "ddp_again")):
            ratio = 100 * (times[:, column] / times[:, [0, 3]].mean(axis=1) - 1)
            if column == 3:
                ratio = 100 * (times[:, 3] / times[:, 0] - 1)
            row[f"{name}_%"] = float(np.median(ratio))
            row[f"{name}_quartiles_%"] = "{:.1f} to {:.1f}".format(*np.percentile(ratio, (25, 75)))
        rows.append({**row, "cycles": args.cycles})
    write_table(rows, HERE / "results" / "overhead.json", "overhead on two equal workers, over ddp")


if __name__ == "__main__":
    main()
