"""What ``hetero_ddp`` costs where it cannot help: two equal local workers against plain DDP.

Both strategies take turns in the same two processes, a short training each, again and again, so that each pair sees the
same machine. The table shows the median over pairs of the ratio of their median step times, and its quartiles; a last
column compares plain DDP with itself in the same way, which shows how far the machine can tell. All trainings have the
same callbacks of the benchmark; ``noise_scale_on_%`` is that with the noise scale in each step over that without.
``noise_scale_alternating_%`` compares steps with the noise scale and the steps right behind them without it, of the
same trainings: the same memory and the same neighbours, so that it scatters least.

Times are taken three times. By the clock, a machine that others share can hardly tell one percent. The processor time
of a step, of all threads of rank 0, is delayed less by others; it has what a strategy computes, and not what it waits
for. And ``noise_scale_share_%`` is the processor time within the functions that measure the noise scale, over that of
the same steps, in trainings of their own, because timing so many calls takes time too: both sides saw the same machine.
It is not what a step gets longer by: it leaves out the caches and the memory that they take from others, and what comes
first after a backward pass waits for cold caches (40 us instead of 4 for a small norm), as the next one would have done
in its place.
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
KINDS = ("ddp", "perf_model", "gns", "gns_attributed", "gns_alternating", "ddp")


MODELS = (  # name, batch, arguments, share of the steps
    ("convolutions", 64, ("--width", "32", "--size", "12"), 1.0),
    ("convolutions", 128, ("--width", "32", "--size", "20"), 1.0),
    ("perceptron", 256, ("--hidden", "512"), 1.0),
    ("perceptron", 256, ("--hidden", "1760"), 0.5),
)


def run(cycles, steps, batch, model, port):
    """What is known of the model, and median step times of every short training, by the clock and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "_workload.py"), "--kind", ",".join(KINDS * cycles), "--out", str(out)]
        command += ["--bare", "--steps", str(steps), "--batch", str(batch), *model]
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
        errors = [rank.communicate(timeout=1800)[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join(errors))
        runs, skipped = json.loads(out.read_text()), min(20, steps // 2)
        seconds = [[np.median(run[name][skipped:]) for run in runs] for name in ("seconds", "cpu_seconds")]
        shares = [run["noise_share"] for run in runs if run["noise_share"] is not None]
        known = {
            "parameters": runs[0]["parameters"],
            "noise_scale_share_%": 100 * float(np.median(shares)),
            "noise_scale_alternating_%": alternating(runs[KINDS.index("gns_alternating") :: len(KINDS)], skipped),
        }
        return known, np.array(seconds).reshape(2, cycles, len(KINDS))


def alternating(runs, skipped):
    """Processor time of steps with the noise scale over that of the step behind each, without it, in percent."""
    first = skipped + skipped % 2  # the noise scale is taken in steps 0, 2, 4, ...
    cpu = [run["cpu_seconds"][first:] for run in runs]
    pairs = np.concatenate([np.array(times[: len(times) // 2 * 2]).reshape(-1, 2) for times in cpu])
    return 100 * float(np.median(pairs[:, 0] - pairs[:, 1]) / np.median(pairs[:, 1]))


def compared(times, unit):
    """Columns of one table row: each kind over the mean of the two trainings by plain DDP around it."""
    row = {f"ddp_{unit}": float(np.median(times[:, 0])) * 1e3}
    first, without, with_noise_scale, _, _, last = times.T
    around = (first + last) / 2
    compared_with = {
        "hetero_ddp": (without, around),
        "with_gns_each_step": (with_noise_scale, around),
        "noise_scale_on": (with_noise_scale, without),
        "ddp_again": (last, first),
    }
    for name, (time, base) in compared_with.items():
        ratio = 100 * (time / base - 1)
        suffix = "%" if unit == "ms" else "cpu_%"
        row[f"{name}_{suffix}"] = float(np.median(ratio))
        row[f"{name}_quartiles_{suffix}"] = "{:.1f} to {:.1f}".format(*np.percentile(ratio, (25, 75)))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first so many of the models")
    parser.add_argument("--out", default=str(HERE / "results" / "overhead.json"))
    args = parser.parse_args()
    rows = []
    for number, (name, batch, model, share) in enumerate(MODELS[: args.models]):
        steps = max(int(args.steps * share), 2)
        known, (seconds, cpu) = run(args.cycles, steps, batch, model, 29811 + number)
        row = {"model": name, "batch": batch, **known, **compared(seconds, "ms")}
        rows.append({**row, **compared(cpu, "cpu_ms"), "cycles": args.cycles})
    write_table(rows, args.out, "overhead on two equal workers, over ddp")


if __name__ == "__main__":
    main()
