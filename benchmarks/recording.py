"""What the record of a run costs: ``hetero_ddp`` with ``report`` and with ``report=False``, on two equal local workers.

Both take turns in the same two processes, a training each, again and again; each training with a record is compared
with the mean of the two without one around it. All seconds of a training count, because the record is written at sync
rounds, which a median step does not see. The table shows the median over pairs of the ratio, with the half-width of
its 95 % interval (``error``; McGill, Tukey and Larsen 1978), by the clock and by the processor time of rank 0, which
writes. ``own_%`` is the processor time that the recorder counted itself, its predictions included, over that of the
training.

On a machine that others share, such pairs cannot tell half a percent. ``--rounds`` can: in one long training with a
sync round every 20 steps, every other round is recorded, and each stretch of steps that ends in a recorded round is
compared with those before and after it. ``round_ms`` is the median difference, what the record of a round costs, with
its error; ``share_%`` is that over the seconds between two rounds where ``replan="auto"`` chooses them
(``steps_between``, of one more training), and ``share_below_%`` the same for the upper end of the interval.
"""

import argparse
from pathlib import Path

import numpy as np
from _pairs import in_turn, median_and_error
from hardware import write_table

HERE = Path(__file__).parent
SKIPPED = 20  # first steps of a training, which warm it up
WARM = 4  # likewise, sync rounds
MODELS = (  # name, batch, arguments, share of the steps
    ("convolutions", 64, ("--width", "32", "--size", "12"), 1.0),
    ("convolutions", 128, ("--width", "32", "--size", "20"), 0.4),
    ("perceptron", 256, ("--hidden", "512"), 0.6),
)


def run(pairs, steps, batch, model, port):
    """What is known of each training, recorded and unrecorded ones in turn, the first unrecorded."""
    kinds = ("unrecorded", *("recorded", "unrecorded") * pairs)
    return in_turn(kinds, steps, batch, model, port)


def compared(runs):
    """Columns of one table row."""
    row = {"step_ms": 1e3 * float(np.median([np.median(run["seconds"][SKIPPED:]) for run in runs]))}
    for name, unit in (("seconds", "%"), ("cpu_seconds", "cpu_%")):
        total = np.array([sum(run[name][SKIPPED:]) for run in runs])
        ratio = 100 * (total[1::2] / ((total[:-2:2] + total[2::2]) / 2) - 1)
        row[f"recording_{unit}"], row[f"recording_error_{unit}"] = median_and_error(ratio)
    own = [100 * run["recording"] / sum(run["cpu_seconds"]) for run in runs[1::2]]
    return {**row, "own_%": float(np.median(own)), "most_own_%": max(own)}


def of_rounds(switched, usual):
    """Columns of a training in which every other round was recorded, and of one with rounds where they usually are."""
    _, steps, seconds, cpu = np.array(switched["rounds"][WARM:]).T
    row = {"rounds": len(steps), "step_ms": 1e3 * float(np.median(seconds / steps))}
    for name, taken in (("round_ms", seconds), ("round_cpu_ms", cpu)):
        recorded = np.arange(2, len(taken) - 1, 2)
        costs = 1e3 * (taken[recorded] - (taken[recorded - 1] + taken[recorded + 1]) / 2)
        row[name], row[f"{name}_error"] = median_and_error(costs)
    between = float(np.median([one[1] for one in usual["rounds"][WARM:]]))
    row["steps_between"] = between
    row["share_%"] = 100 * row["round_ms"] / (between * row["step_ms"])
    row["share_below_%"] = 100 * (row["round_ms"] + row["round_ms_error"]) / (between * row["step_ms"])
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", action="store_true", help="measure single sync rounds")
    parser.add_argument("--long", type=int, default=20, help="times as many steps, with --rounds")
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first so many of the models")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    for number, (name, batch, model, share) in enumerate(MODELS[: args.models]):
        steps = max(int(args.steps * share), 2 * SKIPPED)
        row = {"model": name, "batch": batch, "steps": steps}
        if args.rounds:
            kinds, more = ("record_switched", "rounds"), ("--switched", str(args.long))
            rows.append(row | of_rounds(*in_turn(kinds, steps, batch, model, 29851 + number, *more)))
        else:
            runs = run(args.pairs, steps, batch, model, 29841 + number)
            rows.append({**row, **compared(runs), "pairs": args.pairs})
    out = args.out or str(HERE / "results" / ("recording_rounds.json" if args.rounds else "recording.json"))
    write_table(rows, out, "cost of the record, on two equal workers")


if __name__ == "__main__":
    main()
