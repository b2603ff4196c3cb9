"""Trainings that are told to end at a random moment, under each launcher and front end, in each mode.

A row for each case: how many of its trainings did not end in time, had another exit code than the launcher has for a
training that ends by itself, ended at different steps on their ranks, or left no checkpoint that can be read.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from hardware import write_table  # noqa: E402

from tests.preemption.runs import CASES, run  # noqa: E402

WRONG = ("hang", "code", "steps", "checkpoint")


def trainings(case, count, seed, until):
    """Tell so many trainings of a case to end, unless time is up; return their row."""
    row = {**dict(zip(("launcher", "front_end", "mode"), case, strict=True)), "runs": 0, **dict.fromkeys(WRONG, 0)}
    longest = 0.0
    for number in range(count):
        if time.monotonic() > until:
            break
        whom = CASES[case][number % len(CASES[case])]
        outcome = run(*case, whom, random.Random(f"{seed} {' '.join(case)} {number}"))
        row["runs"] += 1
        longest = max(longest, outcome.seconds)
        for name in WRONG:
            if text := getattr(outcome, name):
                row[name] += 1
                print(f"--- {' '.join(case)} {number}, told {whom}: {name}\n{text}", flush=True)
    return {**row, "longest_s": round(longest, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="of each case")
    parser.add_argument("--only", nargs="*", default=[], help="launchers, front ends or modes")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no training begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(HERE / "results" / "preemption.json"))
    args = parser.parse_args()
    until, chosen = time.monotonic() + 60 * args.minutes, [case for case in CASES if set(args.only) <= set(case)]
    rows = [trainings(case, args.runs, args.seed, until) for case in chosen]
    write_table(rows, args.out, "trainings that are told to end at a random moment")


if __name__ == "__main__":
    main()
