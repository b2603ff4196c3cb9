"""Trainings that are told to end at random moments, under each launcher; ``benchmarks/preemption.py`` runs all cases.

Counted are jobs that did not end in time, exit codes other than those that the launcher has for a training that ends by
itself, ranks that ended at different steps, and jobs that left no checkpoint that can be read.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tests.ranks import free_port

JOB = Path(__file__).with_name("job.py")
BIN = Path(sys.executable).parent
MODES = ("plain", "block top-k", "stale", "stale block top-k", "hierarchy", "adaptive", "elastic", "fsdp")
BEGIN_S, END_S = 60.0, 30.0
"""Longest wait for a job's first step, and for its end after the signal: the grace time of torchrun, and of SLURM."""
COMMON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

LAUNCHERS = {
    "script": lambda job: [[sys.executable, *job]],
    "torchrun": lambda job: [[BIN / "torchrun", "--nproc_per_node=2", f"--master_port={free_port()}", *job]],
    "launch": lambda job: [
        [BIN / "lightning-hetero", "launch", "--cpu", "--num_processes", "2", "--main_process_port", free_port(), *job]
    ],
    "slurm": lambda job: [[sys.executable, *job]] * 2,
}
ENDED = {  # exit codes of the launcher: if the ranks are told, if the launcher is, which tells the ranks
    "script": (0, 0),
    "torchrun": (0, 1),
    "launch": (0, 143),
    "slurm": (0, 0),
}


def logs(folder):
    """How the logs end of all that was started in a folder."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*")))


def kill_group(process):
    """End a process and those that it has started at once, as a machine that is switched off does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                victim.kill()
    process.wait()


@dataclass
class Outcome:
    """What was wrong with a run, each ``""`` if nothing was."""

    hang: str = ""
    code: str = ""
    steps: str = ""
    checkpoint: str = ""
    seconds: float = 0.0


class Job:
    """One training, its processes and its folder."""

    def __init__(self, folder, launcher, front_end, mode):
        self.folder, self.launcher = Path(folder), launcher
        commands = LAUNCHERS[launcher]([JOB, folder, front_end, mode])
        port, self.processes = str(free_port()), []
        for task, command in enumerate(commands):
            env = {**os.environ, **COMMON, "MASTER_PORT": port}
            if launcher == "slurm":
                env |= self._slurm(task)
            with open(self.folder / f"log-{task}", "w") as log:
                process = subprocess.Popen(
                    list(map(str, command)),
                    env=env,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self.processes.append(process)

    def _slurm(self, task):
        """SLURM's variables of a task, and ``scontrol``, which notes how it was called."""
        scontrol = self.folder / "bin" / "scontrol"
        scontrol.parent.mkdir(exist_ok=True)
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {self.folder}/requeued\n')
        scontrol.chmod(0o755)
        return {
            "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": "localhost",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "RANK": str(task),
        }

    def wait_for(self, pattern, count, limit):
        """Files of that name, as soon as there are so many; fewer if the job ends before, or not in time."""
        deadline = time.monotonic() + limit
        while len(found := sorted(self.folder.glob(pattern))) < count and time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.01)
        return found

    def ranks(self):
        """Process numbers of the ranks, once both have trained a step.

        Raises:
            RuntimeError: if they do not come so far.
        """
        found = self.wait_for("rank-*", 2, BEGIN_S)
        if len(found) < 2:
            raise RuntimeError(f"the job did not begin\n{logs(self.folder)}")
        return [int(path.read_text()) for path in found]

    def wait(self, limit):
        """The exit codes of all processes that were started, ``None`` for one that has not ended in time."""
        deadline = time.monotonic() + limit
        codes = []
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            codes.append(process.poll())
        return codes

    def close(self):
        for process in self.processes:
            kill_group(process)
        for path in self.folder.glob("rank-*"):  # also those that have lost their launcher
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def tell(job, ranks, whom, rng):
    """Send SIGTERM to all ranks within 4 ms, to one of them, or to the launcher."""
    if whom == "launcher":
        job.processes[0].send_signal(signal.SIGTERM)
        return
    chosen = rng.sample(ranks, 2 if whom == "all" else 1)
    for pid in chosen:
        os.kill(pid, signal.SIGTERM)
        time.sleep(rng.uniform(0, 0.004))


def requeue(job, ranks, rng):
    """Send SLURM's signal to all ranks, and wait until the job has been queued again; what is wrong."""
    for pid in rng.sample(ranks, 2):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(rng.uniform(0, 0.004))
    if not job.wait_for("requeued", 1, END_S):
        return "was not queued again"
    asked = (job.folder / "requeued").read_text().splitlines()
    return "" if asked == ["requeue 4711"] else f"scontrol was called with {asked}"


def readable(folder):
    """What is wrong with the checkpoints in a folder."""
    saved = [path for path in Path(folder).rglob("*") if path.suffix in (".ckpt", ".safetensors")]
    if not saved:
        return "there is none"
    for path in saved:
        if path.is_dir() and not (path / ".metadata").exists():  # of a sharded model
            return "it is not whole"
        if path.is_file() and path.suffix == ".ckpt":
            torch.load(path, weights_only=True)
    if list(Path(folder).rglob("checkpoint-is-incomplete.txt")):
        return "it is not whole"
    return ""


def gone(pid, until):
    """Whether a process has ended by then."""
    while psutil.pid_exists(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def run(launcher, front_end, mode, whom, rng):
    """A training that is told to end up to half a second after its first step."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, launcher, front_end, mode)
        try:
            ranks = job.ranks()
            time.sleep(rng.uniform(0, 0.5))
            wrong = requeue(job, ranks, rng) if launcher == "slurm" and front_end == "lightning" else ""
            began = time.monotonic()
            tell(job, ranks, whom, rng)
            codes = job.wait(END_S)
            left = [pid for pid in ranks if not gone(pid, began + END_S)]
            outcome.seconds = time.monotonic() - began
            if None in codes or left:
                outcome.hang = f"{codes}, left: {left}\n{logs(job.folder)}"
                return outcome
            expected = ENDED[launcher][whom == "launcher"]
            if set(codes) != {expected}:
                outcome.code = f"{codes}\n{logs(job.folder)}"
            steps = [path.read_text() for path in sorted(job.folder.glob("ended-*"))]
            if len(steps) < 2 or (len(set(steps)) > 1 and mode != "elastic"):
                outcome.steps = f"{steps}\n{logs(job.folder)}"
            outcome.checkpoint = wrong or readable(job.folder / "saved")
            if launcher == "slurm" and not outcome.checkpoint:
                outcome.checkpoint = "" if list(job.folder.glob("hpc_ckpt_*.ckpt")) else "SLURM's is missing"
        finally:
            job.close()
    return outcome


CASES = {
    ("slurm", "lightning", "plain"): ("all",),
    ("launch", "lightning", "plain"): ("all", "one", "launcher"),
    ("launch", "accelerate", "plain"): ("all", "one", "launcher"),
    ("launch", "transformers", "plain"): ("all", "one", "launcher"),
    ("torchrun", "fabric", "plain"): ("all", "one", "launcher"),
    ("torchrun", "own", "plain"): ("all", "one", "launcher"),
    **{("script", "lightning", mode): ("all", "one", "launcher") for mode in MODES},
    **{("torchrun", "lightning", mode): ("all", "one", "launcher") for mode in MODES},
}
"""Launcher, front end and mode, and who may be told."""
