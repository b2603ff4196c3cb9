"""A job of ``_lossy_fit.py``: its start, what its workers' notes say while it runs, and an account of them at its end.

What counts is what ended in the weights. Each group of workers begins with the state after some step; steps that a
group before has done after that one are void, because nobody was left who had them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from _lossy_fit import KEPT, LOCAL, MOMENTUM, RATE, SAMPLES, WORKERS, Numbers, loss_of, network
from _lossy_notes import moments

HERE = Path(__file__).parent
TOTAL = LOCAL * WORKERS
NEAR = 1e-9  # between weights that differ by rounding alone


class LossError(RuntimeError):
    """Raised if a job stands still, ends in an error, or has lost a sample."""


@dataclass
class Life:
    """One process of a worker, as its notes say.

    Args:
        slot: slot of the worker.
        life: how often it was started before.
        pid: its process.
        created: when that was started, as the kernel says.
        notes: all its notes so far.
    """

    slot: int
    life: int
    pid: int
    created: float
    notes: list = field(default_factory=list)

    @property
    def generation(self):
        """Number of the newest group in which it has completed a step; -1 before its first."""
        return next((note["generation"] for note in reversed(self.notes) if "done" in note), -1)


class Job:
    """A running job.

    Args:
        folder: where workers leave their notes, and the launcher its log.
        process: the launcher.
        workers: number of workers.
    """

    def __init__(self, folder, process, workers=WORKERS):
        self.folder, self.process, self.workers = Path(folder), process, workers
        self.lives, self.read = {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """End the launcher, and with it all that it has started."""
        self.poll()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            for life in self.newest().values():
                self.signal(life, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=40)
            self.process.kill()
        self.process.wait()

    def signal(self, life, number):
        """Send a signal to a worker; return whether it was there, and not another process with its number."""
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(life.pid).create_time() == life.created:
                os.kill(life.pid, number)
                return True
        return False

    def poll(self):
        """Read what is new in the notes."""
        for path in sorted(self.folder.glob("notes-*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self.read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.read[path] = self.read.get(path, 0) + len(whole)
            notes = [json.loads(line) for line in whole.splitlines()]
            if path not in self.lives and notes:
                self.lives[path] = Life(*map(int, path.stem.split("-")[1:]), notes[0]["created"])
            if notes:
                self.lives[path].notes += notes

    def newest(self):
        """Newest life of each slot."""
        found = {}
        for life in self.lives.values():
            if life.slot not in found or found[life.slot].life < life.life:
                found[life.slot] = life
        return found

    def members(self):
        """Newest lives that have completed a step in the newest group of all."""
        newest = self.newest().values()
        last = max((life.generation for life in self.lives.values()), default=-1)
        return [life for life in newest if life.generation == last >= 0]

    def first_done(self, after, generation=-1):
        """When a step was first completed after a moment, in a group after this one; ``None`` if none was."""
        times = [
            note["time"]
            for life in self.lives.values()
            for note in reversed_while(life.notes, lambda note: note["time"] > after)
            if "done" in note and note["generation"] > generation
        ]
        return min(times, default=None)

    def wait(self, condition, seconds, what):
        """Wait until a condition holds, and return its value; the job must go on meanwhile.

        Raises:
            LossError: if it does not hold in time, or the job has ended.
        """
        until = time.monotonic() + seconds
        while True:
            self.poll()
            if value := condition():
                return value
            if self.process.poll() is not None:
                raise LossError(f"the job has ended with code {self.process.poll()}, before {what}\n{self.tail()}")
            if time.monotonic() > until:
                for life in self.newest().values():
                    self.signal(life, signal.SIGUSR2)  # writes its stacks
                time.sleep(1)
                raise LossError(f"{seconds:.0f} s have passed without {what}\n{self.tail()}")
            time.sleep(0.02)

    def tail(self):
        """Last lines of the log."""
        log = self.folder / "log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else ""

    def stop(self, seconds):
        """Have the job end by itself after an epoch that is not far; return its exit code."""
        self.poll()
        epoch = max(note["epoch"] for life in self.lives.values() for note in life.notes[-4:] if "epoch" in note)
        new = self.folder / "last.new"
        new.write_text(str(epoch + 3))
        new.rename(self.folder / "last")
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.wait(lambda: False, 0, "an end of the job")
        if code:
            raise LossError(f"the job has ended with code {code}\n{self.tail()}")
        self.poll()


def reversed_while(notes, condition):
    """Yield the last notes for which a condition holds."""
    for note in reversed(notes):
        if not condition(note):
            return
        yield note


def started(folder, *command, **environment):
    """Start a launcher; its log is in the folder."""
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE.parent)}
    with open(Path(folder) / "log", "ab") as log:
        return subprocess.Popen(
            [*map(str, command)], env={**os.environ, **settings, **environment}, stdout=log, stderr=subprocess.STDOUT
        )


class Keepers:
    """Keepers that a scheduler starts one by one, without torchrun; to a job, they are one process.

    Args:
        start: starts the keeper of a slot.
        slots: number of slots.
    """

    def __init__(self, start, slots):
        self.running = {slot: start(slot) for slot in range(slots)}

    def lose(self, slot):
        """Kill a keeper, and with it its worker, and nobody starts it again."""
        self.running.pop(slot).kill()

    def poll(self):
        """Return the greatest exit code of those that were not killed; ``None`` while one of them runs."""
        codes = [keeper.poll() for keeper in self.running.values()]
        return None if None in codes else max(codes, key=abs)

    def send_signal(self, number):
        for keeper in self.running.values():
            keeper.send_signal(number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=None):
        until = time.monotonic() + (timeout or 0.0)
        for keeper in self.running.values():
            keeper.wait(timeout and max(0.0, until - time.monotonic()))
        return self.poll()


def torchrun(workers=WORKERS):
    """Return the beginning of a command that runs a script on all workers."""
    return sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}"


def kept_job(folder, port, silence=5.0, script="_lossy_fit.py", workers=WORKERS, arguments=()):
    """Return a job of workers with keepers, under torchrun."""
    keeper = (f"--master-port={port}", "-m", "lightning_hetero.keeper", "--max-restarts=100000", f"--silence={silence}")
    return Job(folder, started(folder, *torchrun(workers), *keeper, HERE / script, folder, *arguments), workers)


def keepers_apart(folder, port, silence, workers, attempt):
    """Return keepers of workers that save ``last.ckpt``, started one by one; that of slot 0 holds the job's store."""
    command = (sys.executable, "-m", "lightning_hetero.keeper", "--max-restarts=100000", f"--silence={silence}")

    def start(slot):
        ranks = {"RANK": slot, "LOCAL_RANK": slot, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
        settings = ranks | {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ATTEMPT": attempt}
        environment = {name: str(value) for name, value in settings.items()}
        return started(folder, *command, HERE / "_lossy_fit.py", folder, "--last", **environment)

    return Keepers(start, workers)


def notes_folder(name):
    """Return an empty folder for the notes of a job, which is made if there is none."""
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} must be empty: the notes of another job would count as those of this one")
    return folder


def end_after(seconds):
    """Raise an error in this process when so many seconds have passed."""

    def too_long(*_):
        raise LossError(f"the benchmark was not done within {seconds} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)


@dataclass(frozen=True)
class Step:
    """A step that ended in the weights.

    Args:
        epoch: its epoch.
        samples: all its samples, by rank.
        time: when it was completed.
    """

    epoch: int
    samples: tuple[tuple[int, ...], ...]
    time: float


def steps_in_the_weights(lives, total):
    """Return the steps that ended in the weights, in their order, and the number of those that were done but are void.

    Args:
        lives: all lives of the job.
        total: number of steps that the workers count at the end.

    Raises:
        LossError: if a rank's samples of such a step are unknown.
    """
    groups, begun, done = sorted_notes(lives)
    found, end, void = {}, total, 0
    for number in sorted(groups, reverse=True):
        if len(groups[number]) > 1:
            raise LossError(f"group {number} began in different steps or sizes: {sorted(groups[number])}")
        ((start, world),) = groups[number]
        for step in range(start, end):
            notes = begun.get((number, step), {})
            if sorted(notes) != list(range(world)):
                raise LossError(f"step {step} of group {number}: of {world} ranks, {sorted(notes)} have noted samples")
            ranks = [notes[rank] for rank in range(world)]
            time_of = done.get((number, step), max(note["time"] for note in ranks))
            found[step] = Step(ranks[0]["epoch"], tuple(tuple(note["samples"]) for note in ranks), time_of)
        void += sum(key[0] == number and key[1] >= end for key in done)
        end = min(end, start)
    if end > 0:
        raise LossError(f"the first {end} steps are in no notes")
    return [found[step] for step in range(total)], void


def sorted_notes(lives):
    """Return first steps and sizes of each group, samples of each of its steps by rank, and when these were done."""
    groups, begun, done = {}, {}, {}
    for note in (note for life in lives for note in life.notes):
        if "start" in note:
            groups.setdefault(note["generation"], set()).add((note["start"], note["world"]))
        elif "step" in note:
            begun.setdefault((note["generation"], note["step"]), {})[note["rank"]] = note
        elif "done" in note:
            key = note["generation"], note["done"]
            done[key] = min(note["time"], done.get(key, note["time"]))
    return groups, begun, done


def check_samples(steps, total=TOTAL, samples=SAMPLES):
    """Check that each step has the whole total, and each epoch each sample once.

    Raises:
        LossError: if one is missing, or was taken twice.
    """
    epochs = {}
    for number, step in enumerate(steps):
        if sum(map(len, step.samples)) != total:
            raise LossError(f"step {number} has {sum(map(len, step.samples))} samples in the place of {total}")
        epochs.setdefault(step.epoch, Counter()).update(sample for rank in step.samples for sample in rank)
    if sorted(epochs) != list(range(len(epochs))):
        raise LossError(f"epochs {sorted(epochs)} were trained on")
    for epoch, taken in epochs.items():
        missing = sorted(set(range(samples)) - set(taken))
        twice = sorted(sample for sample, times in taken.items() if times > 1)
        if missing or twice:
            raise LossError(f"epoch {epoch} lacks the samples {missing} and has {twice} more than once")


def check_progress(lives):
    """Check that no worker goes back behind a step that it has completed.

    Raises:
        LossError: if one does.
    """
    for life in lives:
        done = -1
        for note in life.notes:
            begins = note.get("start", note.get("step"))
            if begins is not None and begins <= done:
                raise LossError(f"worker {life.slot} has completed step {done} and begins in step {begins} later")
            done = note.get("done", done)


def check_saved(folder, total):
    """Check that the only checkpoint in a folder, if there is one, is ``last.ckpt``, and the newest; return its step.

    Raises:
        LossError: if there are others, or it is too old.
    """
    names = sorted(path.name for path in folder.glob("*"))
    if not names:
        return 0
    step = torch.load(folder / "last.ckpt", weights_only=False)["global_step"]
    if names != ["last.ckpt"] or step <= total - 2 * KEPT:
        raise LossError(f"after {total} steps, there are {names}, and last.ckpt is of step {step}")
    return step


def check_replicas(folder, workers=WORKERS):
    """Return the weights and the number of steps at the end, which must be equal on all workers.

    Raises:
        LossError: if they are not, or a worker has left none.
    """
    ends = [torch.load(path, weights_only=True) for path in sorted(Path(folder).glob("end-*.pt"))]
    if len(ends) != workers:
        raise LossError(f"{len(ends)} of {workers} workers have ended with weights")
    first = ends[0]
    for end in ends[1:]:
        equal = all(torch.equal(first["weights"][name], end["weights"][name]) for name in first["weights"])
        if not equal or end["steps"] != first["steps"]:
            raise LossError("workers have ended with different weights")
    return first["weights"], first["steps"]


def alone(steps):
    """Return the weights of one process that takes these steps, and what its optimizer keeps, by plain torch."""
    net, data = network(), Numbers()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in steps:
        samples = sorted(sample for rank in step.samples for sample in rank)
        optimizer.zero_grad()
        loss_of(net, data.inputs[samples]).backward()
        optimizer.step()
    return net.state_dict() | moments(optimizer)


def account(job):
    """Return the steps of a job that has ended, the void ones, and how far its weights are from :func:`alone`.

    Raises:
        LossError: if a sample is lost or taken twice, a worker goes back behind a step that it has completed, replicas
            or their optimizers differ, or are not those of these steps, or ``last.ckpt`` is not the newest checkpoint.
    """
    weights, total = check_replicas(job.folder, job.workers)
    check_progress(job.lives.values())
    check_saved(Path(job.folder) / "saved", total)
    steps, void = steps_in_the_weights(job.lives.values(), total)
    check_samples(steps, LOCAL * job.workers)
    others = alone(steps)
    difference = max(float((weights[name] - others[name]).abs().max()) for name in weights)
    if not difference < NEAR:
        raise LossError(f"weights differ by {difference:.3g} from those of one process that takes the same steps")
    return steps, void, difference
