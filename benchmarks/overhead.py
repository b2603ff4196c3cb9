"""What ``hetero_ddp`` costs where it cannot help: two equal local workers against plain DDP.

Both strategies take turns in the same two processes, a short training each, again and again, so that each pair sees the
same machine. The table shows the median over pairs of the ratio of their median step times, and its quartiles; a last
column compares plain DDP with itself in the same way, which shows how far the machine can tell. All trainings have the
same callbacks of the benchmark.

``noise_scale_%`` is what the noise scale in each step adds, with all that its callback does. Within a training it is
taken out for ten steps and put back for ten, callback and all. The first step of each ten is left out, and the other
nine are compared with those of the tens before and behind. The median over all of them is given, with the half-width
of its 95 % interval (``noise_scale_error_%``; McGill, Tukey and Larsen 1978).

Times are taken twice. By the clock, a machine that others share can hardly tell one percent. The processor time of a
step, of all threads of rank 0, is delayed less by others; it has what a strategy computes, and not what it waits for.
"""

import argparse
from pathlib import Path

import numpy as np
from _pairs import in_turn, median_and_error
from _workload import Switched
from hardware import write_table

HERE = Path(__file__).parent
KINDS = ("ddp", "perf_model", "ddp", "gns_switched")
TURNS = 3  # of the kinds that are compared with one another; the last is compared with itself
SWITCHED = 6  # times as many steps

MODELS = (  # name, batch, arguments, share of the steps
    ("convolutions", 64, ("--width", "32", "--size", "12"), 1.0),
    ("convolutions", 128, ("--width", "32", "--size", "20"), 1.0),
    ("perceptron", 256, ("--hidden", "512"), 1.0),
    ("perceptron", 256, ("--hidden", "1760"), 0.5),
)


def run(cycles, steps, batch, model, port):
    """What is known of the model, and median step times of every short training, by the clock and of the processor."""
    runs = in_turn(KINDS * cycles, steps, batch, model, port, "--switched", str(SWITCHED))
    skipped = min(20, steps // 2)
    seconds = [[np.median(run[name][skipped:]) for run in runs] for name in ("seconds", "cpu_seconds")]
    switched = runs[TURNS :: len(KINDS)]
    known = {"parameters": runs[0]["parameters"], **on_over_off(switched, "seconds", "%")}
    known |= on_over_off(switched, "cpu_seconds", "cpu_%")
    return known, np.array(seconds).reshape(2, cycles, len(KINDS))[:, :, :TURNS]


def on_over_off(runs, name, unit):
    """Steps with the noise scale over those without it around them, in percent."""
    ratios = []
    for run in runs:
        count = len(run[name]) // Switched.STEPS
        times = np.array(run[name][: count * Switched.STEPS]).reshape(count, -1)[:, 1:].sum(axis=1)
        ratios += [times[i] / (times[i - 1] + times[i + 1]) * 2 - 1 for i in range(2, len(times) - 1, 2)]
    middle, error = median_and_error(ratios)
    return {f"noise_scale_{unit}": 100 * middle, f"noise_scale_error_{unit}": 100 * error}


def compared(times, unit):
    """Columns of one table row: each kind over the mean of the two trainings by plain DDP around it."""
    row = {f"ddp_{unit}": float(np.median(times[:, 0])) * 1e3}
    first, strategy, last = times.T
    for name, (time, base) in {"hetero_ddp": (strategy, (first + last) / 2), "ddp_again": (last, first)}.items():
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
