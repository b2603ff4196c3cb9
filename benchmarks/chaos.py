"""A training under random faults: kills, segfaults, freezes, pauses, slow workers, slow links and cut links.

One fit on workers with keepers (:mod:`lightning_hetero.keeper`) under torchrun, in which stretches without faults
and stretches with ten faults each take turns (ABBA). Times between faults are exponential with the mean ``--mean``; the
kind and the worker are drawn at random, the worker in whatever it does, be it in its start. One worker that has the
state is always spared. A stretch with faults ends when all workers train again. At the end, every sample of every epoch
must be in the weights exactly once, no worker may have gone back behind a step that it has completed, the replicas and
their optimizers must be equal, and those of one process that takes the same steps.

The goodput is the samples that ended in the weights per second. ``stall_s`` is the longest time without a completed
step that a fault begins, ``whole_s`` the time until all train again, half a second later than the fault or more;
both include what other faults do meanwhile.

The kills alone, on three and on four workers: ``chaos.py --kinds kill --events 17 --each 17 --mean 1 --workers 3 4
--seed 0 1 2 --last --out results/kills.json``.

With ``--apart``, keepers are started one by one, as by a scheduler: torchrun would end the job with any of them. Then
``keeper`` is one more kind: the keeper is killed with its worker, and the others go on without that slot. In the end,
the keeper that holds the job's store is killed. All others must end with code 1, and the job that is started again goes
on from ``last.ckpt``: ``chaos.py --apart --kinds kill kill kill keeper --events 8 --each 8 --mean 1 --seed 0 1 2 --out
results/keepers.json``.
"""

import argparse
import itertools
import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from _lossy_job import (
    LOCAL,
    Job,
    LossError,
    account,
    check_saved,
    end_after,
    keepers_apart,
    kept_job,
    notes_folder,
)
from hardware import write_table

HERE = Path(__file__).parent
KINDS = ("kill", "segfault", "freeze", "pause", "slow", "link delay", "link cut")
DEADLY = ("kill", "segfault", "freeze", "keeper")
LAST = {"pause": (0.2, 2.0), "slow": (1.0, 4.0), "link delay": (1.0, 4.0)}  # seconds, least and most


@dataclass
class Event:
    """A fault that has happened.

    Args:
        kind: what.
        slot: to whom.
        at: when it began.
        over: when it is over, if nobody is lost.
        whole: when all workers trained again.
    """

    kind: str
    slot: int
    at: float
    over: float
    whole: float | None = None


class Chaos:
    """Faults of a running job.

    Args:
        job: the job.
        rng: random numbers.
        patience: seconds within which a step is completed after each fault, and all workers train.
    """

    def __init__(self, job, rng, patience):
        self.job, self.rng, self.patience = job, rng, patience
        self.events, self.lost = [], set()

    def victim(self, kind):
        """Return a worker to which it may happen, ``None`` if there is none."""
        lives = [life for life in self.job.newest().values() if life.pid not in self.lost]
        having = [life for life in self.job.members() if life.pid not in self.lost]
        self.rng.shuffle(lives)
        for life in lives:
            if kind == "keeper" and life.slot == 0:  # holds the store
                continue
            if kind not in DEADLY or any(one is not life for one in having):
                return life
        return None

    def strike(self, kind):
        """Do it to someone; return whether there was one."""
        life = self.victim(kind)
        if life is None:
            return False
        seconds = self.rng.uniform(*LAST.get(kind, (0.0, 0.0)))
        at = time.monotonic()
        if not self.inflict(kind, life, seconds):
            return False  # it has just ended
        self.events.append(Event(kind, life.slot, at, at + seconds))
        if kind in DEADLY:
            self.lost.add(life.pid)
        return True

    def inflict(self, kind, life, seconds):
        """Make the fault; return whether the process was there."""
        if kind in ("kill", "freeze"):
            return self.job.signal(life, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "keeper":
            self.job.process.lose(life.slot)
            self.job.workers -= 1
            return True
        if kind == "pause":
            there = self.job.signal(life, signal.SIGSTOP)
            threading.Timer(seconds, self.end_pause, (life,)).start()
            return there
        order = {"segfault": "segfault", "slow": "slow", "link delay": "delay", "link cut": "cut"}[kind]
        new = self.job.folder / f"new-{life.pid}"
        new.write_text(f"{order} {seconds}")
        new.rename(self.job.folder / f"order-{life.pid}")
        return self.job.signal(life, 0)

    def end_pause(self, life):
        """Let a worker go on, if it was not frozen for good meanwhile."""
        if life.pid not in self.lost:
            self.job.signal(life, signal.SIGCONT)

    def whole(self):
        """Return whether all workers train, half a second after the end of the last fault or later."""
        over = max((event.over + 0.5 for event in self.events), default=0.0)
        last = [life.notes[-1]["time"] for life in self.job.members()]
        if len(last) < self.job.workers or min(last) < over:
            return False
        for event in self.events:
            event.whole = event.whole or time.monotonic()
        return True

    def storm(self, kinds, mean):
        """Let these happen, whatever the others still do, and wait until all workers train again."""
        at = time.monotonic()
        for kind in kinds:
            at += self.rng.expovariate(1 / mean)
            self.go_on(at)
            while not self.strike(kind):
                self.go_on(time.monotonic() + 0.1)
        self.go_on_until_whole()

    def go_on_until_whole(self):
        """Wait until all workers train."""

        def whole():
            self.attend()
            return self.whole()

        self.job.wait(whole, self.patience, f"all workers in training again after {self.events[-3:]}")

    def attend(self):
        """Do what is to be done all the time."""
        self.whole()

    def go_on(self, until):
        """Wait, while the job must complete a step every so often.

        Raises:
            LossError: if it does not.
        """
        while time.monotonic() < until:
            after = time.monotonic() - self.patience
            self.job.wait(lambda after=after: self.job.first_done(after), 0.0, f"a step after {self.events[-3:]}")
            self.attend()
            time.sleep(0.02)


def drawn(rng, events, among):
    """Return kinds of faults in a random order, each about as often."""
    kinds = [among[number % len(among)] for number in range(events)]
    rng.shuffle(kinds)
    return kinds


def stretches(chaos, kinds, mean, each):
    """Let quiet and stormy stretches take turns, ABBA; return kind, beginning and end of each."""
    found, calm = [], mean * each
    parts = [kinds[begin : begin + each] for begin in range(0, len(kinds), each)]
    for number, part in enumerate(parts):
        for stormy in (False, True) if number % 2 == 0 else (True, False):
            begin = time.monotonic()
            if stormy:
                chaos.storm(part, mean)
            else:
                chaos.go_on(begin + calm)
            found.append((stormy, begin, time.monotonic()))
    return found


def goodput(steps, found, stormy, total):
    """Return samples that ended in the weights in such stretches, and the seconds of these."""
    spans = [(begin, end) for kind, begin, end in found if kind == stormy]
    times = np.array([step.time for step in steps])
    inside = sum(int(((times >= begin) & (times < end)).sum()) for begin, end in spans)
    return total * inside, sum(end - begin for begin, end in spans)


def stall(steps, event):
    """Return the longest time without a completed step that a fault begins, at once or within half a second.

    If all workers were lost and began anew, no step before the fault counts any more: the time begins with the fault.
    """
    times = np.array([step.time for step in steps])
    first, last = np.searchsorted(times, [event.at, event.at + 0.5], side="right")
    begin = times[first - 1] if first else event.at
    return float(np.diff([begin, *times[first : last + 1]]).max())


def lose_the_store(job, again, patience):
    """Kill the keeper that holds the store, see all others end, and let the job go on; return what it has cost.

    Raises:
        LossError: if a keeper goes on or ends otherwise, or the job begins anew with another state than the newest one.
    """
    after = job.members()[0].notes[-1].get("done", 0) + 20  # the last fault is over
    job.wait(lambda: job.members()[0].notes[-1].get("done", 0) > after, patience, "20 more steps")
    keepers, began = job.process, time.monotonic()
    keepers.lose(0)
    code = keepers.wait(patience)
    ended = time.monotonic() - began
    job.poll()
    if code != 1:
        raise LossError(f"keepers have ended with {code} when their store was lost\n{job.tail()}")
    done = 1 + max(note["done"] for life in job.lives.values() for note in life.notes if "done" in note)
    saved = check_saved(job.folder / "saved", done)
    job.process = again()
    job.workers = len(job.process.running)
    job.wait(lambda: len(job.members()) == job.workers and job.first_done(began), patience + 60, "steps of a new job")
    first = min(note["start"] for life in job.members() for note in life.notes if "start" in note)
    if first != saved:
        raise LossError(f"the job goes on in step {first}, and last.ckpt is of step {saved}")
    return {"store_ends_s": ended, "redone": done - saved}


def train(job, rng, kinds, mean, each, patience=60.0, again=None):
    """Train under these faults, lose the store if ``again`` starts keepers anew; return the rows of the table."""
    load = os.getloadavg()[0]
    with job:
        chaos = Chaos(job, rng, patience)
        job.wait(chaos.whole, 120, "a first step of all workers")
        job.wait(lambda: min(life.notes[-1].get("done", 0) for life in job.members()) > 20, 60, "20 steps")
        found = stretches(chaos, kinds, mean, each)
        more = {} if again is None else lose_the_store(job, again, patience)
        job.stop(patience + 60)
        steps, void, difference = account(job)
    more |= {"void": void - more.get("redone", 0), "difference": difference, "load": load, "mean_s": mean}
    return rows_of(chaos.events, steps, found, job, more)


def rows_of(events, steps, found, job, more):
    """Return a row for each kind of fault, and one of all."""
    rows = []
    for kind in (*KINDS, "keeper"):
        mine = [event for event in events if event.kind == kind]
        if mine:
            stalls = [stall(steps, event) for event in mine]
            wholes = [event.whole - event.at for event in mine]
            row = {"kind": kind, "events": len(mine), "stall_s": np.median(stalls), "longest_stall_s": max(stalls)}
            rows.append({**row, "whole_s": np.median(wholes), "longest_whole_s": max(wholes)})
    total = LOCAL * job.workers
    with_faults, seconds = goodput(steps, found, True, total)
    without, calm = goodput(steps, found, False, total)
    rate, usual = with_faults / seconds, without / calm
    sums = {"seconds": seconds, "calm_seconds": calm, "goodput": rate, "calm_goodput": usual, "ratio": rate / usual}
    cost = seconds * (1 - rate / usual) / len(events)
    counts = {"steps": len(steps), "samples": total * len(steps), "epochs": steps[-1].epoch + 1}
    groups = {note["generation"] for life in job.lives.values() for note in life.notes if "start" in note}
    counts |= {"lives": len(job.lives), "groups": len(groups)}
    return [*rows, {"kind": "all", "events": len(events), **sums, "cost_s": cost, **counts, **more}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--each", type=int, default=10, help="faults of a stretch")
    parser.add_argument("--mean", type=float, default=3.0, help="seconds between faults")
    parser.add_argument("--silence", type=float, default=5.0, help="seconds after which a keeper kills a frozen worker")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=(*KINDS, "keeper"), metavar="KIND")
    parser.add_argument("--workers", type=int, nargs="+", default=[4], help="one job for each number, and each seed")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--last", action="store_true", help="save last.ckpt, which has to be the newest at the end")
    parser.add_argument("--apart", action="store_true", help="keepers without torchrun, whose store is lost at the end")
    parser.add_argument("--wall", type=int, default=3600, help="seconds after which it is an error")
    parser.add_argument("--port", type=int, default=29871)
    parser.add_argument("--keep", help="folder in which the notes stay")
    parser.add_argument("--out", default=str(HERE / "results" / "chaos.json"))
    args = parser.parse_args()
    if "keeper" in args.kinds and not args.apart:
        parser.error("--kinds keeper: torchrun ends the job with a keeper. Add --apart")
    end_after(args.wall)
    rows = []
    for workers, seed in itertools.product(args.workers, args.seed):
        rng = random.Random(seed)
        kinds = drawn(rng, args.events, args.kinds)
        with tempfile.TemporaryDirectory() as temporary:
            folder = notes_folder(Path(args.keep or temporary) / f"{workers}-{seed}")
            if args.apart:
                keepers = partial(keepers_apart, folder, args.port, args.silence, workers)
                job, again = Job(folder, keepers(attempt=0), workers), partial(keepers, attempt=1)
            else:
                arguments = ["--last"] if args.last else []
                job = kept_job(folder, args.port, args.silence, workers=workers, arguments=arguments)
                again = None
            found = train(job, rng, kinds, args.mean, args.each, again=again)
        rows += [{**row, "workers": workers, "seed": seed} for row in found]
    if len(args.kinds) == 1:  # then the faults of this kind are all
        rows = [{**one, **total} for one, total in zip(rows[::2], rows[1::2], strict=True)]
    write_table(rows, args.out, "a training under random faults")


if __name__ == "__main__":
    main()
