"""Seconds that a training stands still when one of its four workers is killed at a random moment, in three ways:

- ``keeper``: each worker has a keeper (:mod:`lightning_hetero.keeper`); the others keep their processes and state.
- ``torchrun``: all are started again by torchrun, and go on from a checkpoint that was saved after the last step.
- ``torchft``: a loop with torchft's process group, manager and lighthouse; each worker has its own torchrun. Needs
  torchft, here or in another interpreter (``--torchft``); left out without it.

The three take turns in one run. ``resume_s`` is the time from the kill to the next optimizer step that the group
without the lost process has completed, ``newcomer_s`` that to the first step that the worker started in its place has
completed, and ``redone`` the most steps that another worker had begun before the kill and began again after it.
"""

import argparse
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from _lossy_job import HERE, WORKERS, Job, end_after, kept_job, started, torchrun
from hardware import write_table


def keeper(folder, port, python):
    return kept_job(folder, port)


def restart(folder, port, python):
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=100000")
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else workers that are started again find old keys
    return Job(folder, started(folder, *torchrun(), *meeting, HERE / "_lossy_fit.py", folder, "--saves", **own_store))


def torchft(folder, port, python):
    return Job(folder, started(folder, python, HERE / "_torchft_loop.py", folder, f"--job={port}"))


WAYS: dict[str, Callable[..., Job]] = {"keeper": keeper, "torchrun": restart, "torchft": torchft}


def all_train(job, steps=20):
    """Return whether all workers have completed so many steps in the newest group."""
    members = job.members()
    return len(members) == WORKERS and all(
        sum(1 for note in life.notes if "done" in note and note["generation"] == life.generation) >= steps
        for life in members
    )


def one_kill(job, rng, patience):
    """Kill a worker; return seconds until the others and its successor have completed a step, and the steps redone."""
    time.sleep(rng.uniform(1.0, 3.0))
    job.poll()
    life = rng.choice(job.members())
    before = max(one.generation for one in job.lives.values())
    at = time.monotonic()
    job.signal(life, signal.SIGKILL)
    resumed = job.wait(lambda: job.first_done(at, before), patience, "a step without the lost worker")

    def successor():
        newest = job.newest()[life.slot]
        return newest.pid != life.pid and next((note["time"] for note in newest.notes if "done" in note), None)

    joined = job.wait(successor, patience, "a step of the newcomer")
    job.wait(lambda: all_train(job), patience, "20 steps of all workers")
    return resumed - at, joined - at, redone(job, life.slot, at)


def redone(job, lost, at):
    """Return how many steps another worker had begun before this moment, and began again later."""
    begun = {}
    for life in job.lives.values():
        if life.slot != lost:
            for note in (note for note in life.notes if "step" in note):
                begun.setdefault((life.slot, note["step"]), []).append(note["time"])
    again = {step for (_, step), times in begun.items() if len(times) > 1 and min(times) <= at < max(times)}
    return len(again)


def step_seconds(job):
    """Return the median time of a step of four workers."""
    times = sorted(note["time"] for note in job.members()[0].notes if "done" in note)
    return float(np.median(np.diff(times)))


def measure(way, port, kills, rng, python, patience=60.0):
    """Return what is known of each kill of one job, and the time of its steps."""
    with tempfile.TemporaryDirectory() as folder, WAYS[way](folder, port, python) as job:
        job.wait(lambda: all_train(job), patience, "20 steps of all workers")
        return [one_kill(job, rng, patience) for _ in range(kills)], step_seconds(job)


def rows_of(found, load):
    """Return a row for each way."""
    rows = []
    for way, (kills, steps) in found.items():
        resume, newcomer, again = (np.array(column, float) for column in zip(*kills, strict=True))
        row = {"way": way, "kills": len(kills), "step_ms": 1e3 * float(np.median(steps)), "redone": int(again.max())}
        for name, taken in (("resume", resume), ("newcomer", newcomer)):
            row |= {f"{name}_s": np.median(taken), f"least_{name}_s": taken.min(), f"most_{name}_s": taken.max()}
        rows.append(row | {"load": load})
    for row in rows:
        row["over_keeper"] = row["resume_s"] / rows[0]["resume_s"]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="of a job")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each way")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--torchft", default=sys.executable, help="an interpreter that has torchft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wall", type=int, default=3600, help="seconds after which it is an error")
    parser.add_argument("--out", default=str(HERE / "results" / "recovery.json"))
    args = parser.parse_args()
    end_after(args.wall)
    ways = list(args.ways)
    if args.torchft == sys.executable and importlib.util.find_spec("torchft") is None and "torchft" in ways:
        ways.remove("torchft")
        print("torchft is left out: it is not installed here; --torchft names an interpreter that has it")
    rng, load = random.Random(args.seed), os.getloadavg()[0]
    found = {way: ([], []) for way in ways}
    for number in range(args.rounds):
        for place, way in enumerate(ways if number % 2 == 0 else ways[::-1]):
            kills, step = measure(way, 29901 + 10 * (number * len(ways) + place), args.kills, rng, args.torchft)
            found[way][0].extend(kills)
            found[way][1].append(step)
    write_table(rows_of(found, load), args.out, "a worker is killed: seconds until training goes on")


if __name__ == "__main__":
    main()
