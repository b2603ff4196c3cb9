"""An hour of the demo's training on its three workers, while their speeds drift and faults happen: ``make soak``.

The workers have keepers (:mod:`lightning_hetero.keeper`) under torchrun and get 0.8, 0.4 and 0.24 of a core, as in
``examples/demo.py``. After five quiet minutes, which show the usual speed, come an hour (``--minutes``) of drift and of
faults, both at random times: every minute on average (``--drift``) a worker gets another share of a core, and every
minute on average (``--mean``) one of the faults of ``chaos.py`` happens, except that the drift takes the place of slow
workers. Every sample of every epoch must be in the weights exactly once, and the replicas equal.

``cores`` is the mean of what the three get together, whether they use it or not. ``ratio`` compares the samples per
core and second with those of the quiet minutes. ``memory`` is that of the worker that lives longest, in MiB, ten
minutes after its first step and at its end.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from contextlib import suppress

import numpy as np
import psutil
from _lossy_job import check_replicas, check_samples, end_after, kept_job, notes_folder, steps_in_the_weights
from _soak_fit import SAMPLES, SHARES, TOTAL, accuracy_of
from chaos import HERE, Chaos, drawn
from hardware import write_table

from lightning_hetero.simulate import Throttle

KINDS = ("kill", "segfault", "freeze", "pause", "link delay", "link cut")
MOST_CORES = 1.7  # of two, so that the workers do not compete
PART = 600.0  # seconds of a row


class Soak(Chaos):
    """Faults and drift of the demo's job.

    Args:
        job: the job.
        rng: random numbers.
        patience: seconds within which a step is completed, and all workers train.
    """

    def __init__(self, job, rng, patience):
        super().__init__(job, rng, patience)
        self.shares, self.throttles, self.stopped = list(SHARES), {}, set()
        self.cores, self.census, self.looked = [(time.monotonic(), sum(SHARES))], {}, 0.0

    def attend(self):
        """Slow workers that have begun to train, and count now and then what each has."""
        super().attend()
        for life in self.job.newest().values():
            if life.generation >= 0 and life.pid not in self.throttles and life.pid not in self.lost | self.stopped:
                self.throttle(life)
        if time.monotonic() > self.looked + 10:
            self.looked = time.monotonic()
            for life in self.job.members():
                self.count(life)

    def throttle(self, life):
        """Let a worker run for its share of the time."""
        throttle = Throttle(self.shares[life.slot], pid=life.pid, period=0.01)
        try:
            self.throttles[life.pid] = throttle.start()
        except (ProcessLookupError, RuntimeError):
            self.lost.add(life.pid)  # it has ended meanwhile

    def count(self, life):
        """Note memory, files and threads of a worker."""
        try:
            process = psutil.Process(life.pid)
            with process.oneshot():
                row = process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
        except psutil.NoSuchProcess:
            return
        self.census.setdefault(life.pid, []).append((time.monotonic(), *row))

    def inflict(self, kind, life, seconds):
        """Make the fault; one that stops the worker ends its throttle first, which would continue it."""
        if kind in ("freeze", "pause") and life.pid in self.throttles:
            self.stopped.add(life.pid)
            self.throttles.pop(life.pid).stop()
        return super().inflict(kind, life, seconds)

    def end_pause(self, life):
        """Let a worker go on, at its own speed."""
        super().end_pause(life)
        self.stopped.discard(life.pid)

    def drift(self):
        """Give a worker another share of a core."""
        slot = self.rng.randrange(len(self.shares))
        most = min(0.9, MOST_CORES - sum(self.shares) + self.shares[slot])
        self.shares[slot] = self.rng.uniform(0.2, most)
        self.cores.append((time.monotonic(), sum(self.shares)))
        life = self.job.newest()[slot]
        if life.pid in self.throttles:
            with suppress(RuntimeError):  # it has ended
                self.throttles[life.pid].set_share(self.shares[slot])

    def hour(self, kinds, seconds, mean, drift):
        """Let drift and faults happen for this long, and wait until all workers train again."""
        begin = time.monotonic()
        fault_at, drift_at = (begin + self.rng.expovariate(1 / each) for each in (mean, drift))
        while min(fault_at, drift_at) < begin + seconds:
            self.go_on(min(fault_at, drift_at))
            if drift_at <= fault_at:
                self.drift()
                drift_at += self.rng.expovariate(1 / drift)
            else:
                kind = next(kinds)
                while not self.strike(kind):
                    self.go_on(time.monotonic() + 0.1)
                fault_at = max(fault_at, time.monotonic()) + self.rng.expovariate(1 / mean)
        self.go_on(begin + seconds)
        self.go_on_until_whole()

    def cores_between(self, begin, end):
        """Return the mean of what the workers got together."""
        times = np.clip([*(at for at, _ in self.cores), end], begin, end)
        return float(np.dot(np.diff(times), [cores for _, cores in self.cores]) / (end - begin))


def endless(rng, kinds):
    """Yield kinds of faults in a random order, each about as often."""
    while True:
        yield from drawn(rng, len(kinds), kinds)


def train(job, rng, minutes, quiet, mean, drift, patience):
    """Train; return the rows of the table."""
    load = os.getloadavg()[0]
    with job:
        soak = Soak(job, rng, patience)
        job.wait(soak.whole, 120, "a first step of all workers")
        soak.go_on(time.monotonic() + 60)  # the first plans
        marks = [time.monotonic(), time.monotonic() + 60 * quiet]
        soak.go_on(marks[1])
        soak.hour(endless(rng, KINDS), 60 * minutes, mean, drift)
        marks += [*np.arange(marks[1] + PART, time.monotonic() - PART / 2, PART), time.monotonic()]
        for throttle in soak.throttles.values():
            throttle.stop()
        job.stop(patience + 60)
        weights, total = check_replicas(job.folder, job.workers)
        steps, void = steps_in_the_weights(job.lives.values(), total)
        check_samples(steps, TOTAL, SAMPLES)
    more = {"accuracy": accuracy_of(weights), "void": void, "epochs": steps[-1].epoch + 1, "load": load}
    counts = {"steps": len(steps), "samples": TOTAL * len(steps), "lives": len(job.lives)}
    return rows_of(soak, steps, marks, {**counts, **more, **longest_life(soak), "mean_s": mean, "drift_s": drift})


def rows_of(soak, steps, marks, more):
    """Return a row for the quiet minutes, for each ten after them, and for all of these."""
    first = row_of(soak, steps, "quiet", *marks[:2])
    parts = [
        row_of(soak, steps, f"{(begin - marks[1]) / 60:.0f}-{(end - marks[1]) / 60:.0f} min", begin, end)
        for begin, end in zip(marks[1:], marks[2:], strict=False)
    ]
    rows = [first, *parts, row_of(soak, steps, "all", marks[1], marks[-1])]
    for row in rows:
        row["ratio"] = row["per_core"] / first["per_core"]
    rows[-1] |= more
    return rows


def row_of(soak, steps, name, begin, end):
    """Return what happened between two moments."""
    times = np.array([step.time for step in steps])
    inside = times[(times >= begin) & (times < end)]
    goodput, cores = TOTAL * len(inside) / (end - begin), soak.cores_between(begin, end)
    kinds = [event.kind for event in soak.events if begin <= event.at < end]
    return {
        "part": name,
        "seconds": end - begin,
        **{kind: kinds.count(kind) for kind in KINDS},
        "drifts": sum(begin <= at < end for at, _ in soak.cores[1:]),
        "cores": cores,
        "goodput": goodput,
        "per_core": goodput / cores,
        "longest_stall_s": float(np.diff(inside).max()),
    }


def longest_life(soak):
    """Return what the worker has that lives longest: ten minutes after its first step, and at its end."""
    rows = np.array(max(soak.census.values(), key=lambda rows: rows[-1][0] - rows[0][0]))
    old = min(600.0, (rows[-1, 0] - rows[0, 0]) / 2)
    part = max(3, len(rows) // 20)
    after = int(np.searchsorted(rows[:, 0], rows[0, 0] + old))
    first, last = np.median(rows[after : after + part], axis=0), np.median(rows[-part:], axis=0)
    row = {"life_s": rows[-1, 0] - rows[0, 0]}
    for place, name in enumerate(("memory", "files", "threads"), 1):
        row |= {f"{name}_before": first[place], f"{name}_after": last[place]}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of drift and faults")
    parser.add_argument("--quiet", type=float, default=5.0, help="minutes before them")
    parser.add_argument("--mean", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--drift", type=float, default=60.0, help="seconds between changes of speed")
    parser.add_argument("--silence", type=float, default=5.0, help="seconds after which a keeper kills a frozen worker")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds within which all workers train again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="folder in which the notes stay")
    parser.add_argument("--out", default=str(HERE / "results" / "soak.json"))
    args = parser.parse_args()
    end_after(int(60 * (args.minutes + args.quiet) + 1200))
    signal.signal(signal.SIGTERM, lambda *_: exit(1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = notes_folder(args.keep or temporary)
        job = kept_job(folder, 29881, args.silence, "_soak_fit.py", len(SHARES))
        rows = train(job, random.Random(args.seed), args.minutes, args.quiet, args.mean, args.drift, args.patience)
    write_table(rows, args.out, "an hour of the demo's training, with drift and faults")


if __name__ == "__main__":
    main()
