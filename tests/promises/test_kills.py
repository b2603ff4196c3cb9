"""Real processes that are killed, stopped, or told to end, under each launcher: nothing is lost, and nothing is left.

A step that a checkpoint holds is done; what a killed attempt did after its last checkpoint is done again.
"""

import contextlib
import importlib
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.failures import rank_monitor
from tests.helpers import Points, Regressor, fit
from tests.kept import Forked, run_kept
from tests.preemption.runs import COMMON, kill_group, logs, run
from tests.promises.faults import MODES, Fault, Injector
from tests.ranks import free_port, run_ranks

LAUNCHED = pytest.mark.slow("starts launchers and workers, which takes seconds, and kills them")
ROOT = Path(__file__).parents[2]
TORCHRUN, SAMPLES = Path(sys.executable).with_name("torchrun"), 96


# torchrun


class Saves(Regressor):
    """Writes its samples down, and ends with SIGKILL at the point that the file ``kill`` has for each attempt.

    While there is a file ``wait``, an attempt waits in its seventh step until it is told to end.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder, self.victim, self.steps, self.told = folder, None, 0, []
        self.net[0].weight.register_hook(lambda gradient: self.die("backward"))

    def on_train_start(self):
        attempt = self.trainer.strategy.broadcast(len(list(self.folder.glob("attempt-*-0"))))
        plans = (self.folder / "kill").read_text().splitlines() if (self.folder / "kill").exists() else []
        if attempt < len(plans):
            rank, point, step = plans[attempt].split()
            self.victim = (point, int(step)) if int(rank) == self.global_rank else None
        self.file = open(self.folder / f"attempt-{attempt:02}-{self.global_rank}", "w", buffering=1)  # noqa: SIM115
        self.file.write(f"{self.trainer.global_step}\n")
        self.trainer.strategy.barrier()

    def die(self, point):
        if self.victim is not None and self.victim[0] == point and self.trainer.global_step >= self.victim[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch, batch_idx):
        indices = batch[2][: self.trainer.strategy.engine.own_size].tolist()
        self.file.write(json.dumps([self.trainer.global_step, self.trainer.current_epoch, indices]) + "\n")
        self.steps += 1
        while self.steps > 6 and (self.folder / "wait").exists() and not self.told:
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.die("optimizer")

    def on_save_checkpoint(self, checkpoint):
        self.die("saving")


def _saves(folder, epochs=2):
    """A worker of any number of machines: it goes on from the last checkpoint, and saves each step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (folder / f"pid-{os.getpid()}").touch()
    model = Saves(folder)
    if (folder / "wait").exists():  # beside what Lightning does
        signal.signal(signal.SIGTERM, lambda *_: model.told.append(True) if model.steps else os._exit(1))

    def dies(owner, name, point):
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: model.die(point) or method(*args, **kwargs))

    dies(Path, "replace", "writing")
    dies(ControlPlane, "gather", "exchange")
    last = folder / "checkpoints" / "last.ckpt"
    saves = ModelCheckpoint(last.parent, save_last=True, every_n_train_steps=1)
    given = {"callbacks": [saves], "enable_checkpointing": True, "ckpt_path": last if last.exists() else None}
    given |= {"num_nodes": int(os.environ["GROUP_WORLD_SIZE"]), "max_epochs": epochs, "dataset": Points(SAMPLES)}
    done = fit(int(os.environ["RANK"]), {"replan": 4}, int(os.environ["LOCAL_WORLD_SIZE"]), 4, model=model, **given)
    (folder / "done").write_text(str(done["steps"]))


def _agent(_rank, folder, restarts):
    """What ``torchrun --standalone --nproc_per_node=2`` does, with workers that are forked: they need not import."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, _saves)(folder)


def attempts(folder):
    """For each attempt that has begun, the lines of all its ranks."""
    found = {}
    for path in sorted(folder.glob("attempt-*")):
        found.setdefault(path.name.split("-")[1], []).append(path.read_text().splitlines())
    return [ranks for ranks in found.values() if all(ranks)]


def check_samples(folder, epochs):
    """Each sample counts once an epoch: what was not saved was done again. Returns the step at which attempts began."""
    found, taken = attempts(folder), {epoch: [] for epoch in range(epochs)}
    starts = [int(ranks[0][0]) for ranks in found]
    for ranks, following in zip(found, [*starts[1:], 10**9], strict=True):
        for step, epoch, indices in (json.loads(line) for rank in ranks for line in rank[1:] if line.endswith("]")):
            taken[epoch] += indices if step < following else []
    assert [sorted(indices) for indices in taken.values()] == [list(range(SAMPLES))] * epochs
    return starts


@pytest.fixture
def agent(tmp_path):
    """Runs an agent; its errors. No worker may outlive it."""

    def _agent_of(kills, restarts):
        (tmp_path / "kill").write_text(kills)
        # with the agent's own store, workers that start again may meet addresses of those that were killed
        anew = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return run_ranks(_agent, 1, tmp_path, restarts, timeout=60, env=anew, expect_errors=True, start="fork")

    yield _agent_of
    left = []
    for path in tmp_path.glob("pid-*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(path.name.removeprefix("pid-")))
            left += [process] if process.create_time() <= path.stat().st_mtime + 5 else []  # else it is another one
    for process in left:
        process.kill()
    assert not left


@LAUNCHED
@pytest.mark.parametrize("point", ["backward", "optimizer", "saving", "writing", "exchange"])
def test_workers_killed_and_started_again(agent, tmp_path, point):
    """``saving`` is before the checkpoint's file is there, ``writing`` before it is whole: rank 0 writes it."""
    second = 0 if point == "writing" else 1
    assert agent(f"0 {point} 3\n{second} {point} 14\n", restarts=2) == []
    assert (tmp_path / "done").read_text() == "24"
    first, second, third = check_samples(tmp_path, epochs=2)
    assert 0 == first < second < third


@LAUNCHED
def test_more_kills_than_restarts_are_an_error(agent, tmp_path):
    [(_, kind, message)] = agent("0 backward 7\n", restarts=0)
    assert kind == "ChildFailedError"
    assert "SIGKILL" in message
    assert not (tmp_path / "done").exists()


@LAUNCHED
@pytest.mark.timeout(600)
def test_a_machine_leaves_and_another_comes(tmp_path):
    """Two machines, one is switched off, the other goes on alone, a third joins."""
    (tmp_path / "wait").touch()
    port = free_port()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic")
    patience = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=100"
    nodes = ("--nnodes=1:3", "--nproc_per_node=1", "--max-restarts=5", "--monitor-interval=0.2")
    command = [str(part) for part in (TORCHRUN, *nodes, *rendezvous, patience, __file__, tmp_path)]
    env = {**os.environ, **COMMON, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    machines = []

    def comes():
        with open(tmp_path / f"log-{len(machines)}", "w") as log:
            machines.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return len(attempts(tmp_path))

    def until(condition):
        end = time.monotonic() + 100
        while not condition():
            assert time.monotonic() < end, logs(tmp_path)
            time.sleep(0.1)

    def trains(world, after):
        found = attempts(tmp_path)
        return len(found) > after and len(found[-1]) == world and min(map(len, found[-1])) > 4

    def held():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        comes()
        until(held)  # the first holds the store, since it stays to the end
        comes()
        until(lambda: trains(2, 0))
        kill_group(machines[1])
        before = len(attempts(tmp_path))
        until(lambda: trains(1, before))
        before = comes()
        until(lambda: trains(2, before))
        (tmp_path / "wait").unlink()
        until(lambda: machines[0].poll() is not None and machines[2].poll() is not None)
    finally:
        for machine in machines:
            kill_group(machine)
    assert (machines[0].returncode, machines[2].returncode) == (0, 0), logs(tmp_path)
    check_samples(tmp_path, epochs=12)


# keepers

KEPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from tests.helpers import Points, Regressor, fit
folder = Path(sys.argv[1])

class Dies(Regressor):
    def training_step(self, batch, batch_idx):
        left = self.trainer.estimated_stepping_batches - self.trainer.global_step
        while left <= 3 and self.trainer.world_size < 3 and not self.trainer.strategy._roster.next_is_open:
            time.sleep(0.01)  # the newcomer comes before the end
        if batch_idx == 6 and os.environ["LIGHTNING_HETERO_SLOT"] == "1" and os.environ["LIGHTNING_HETERO_LIFE"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

done = fit(int(os.environ["RANK"]), "hetero_ddp", 3, 4, model=Dies(), dataset=Points(192), max_epochs=2)
torch.save(done["weights"], folder / f"done-{os.environ['LIGHTNING_HETERO_SLOT']}")
"""


@LAUNCHED
def test_torchrun_with_keepers_goes_on_without_a_killed_worker(tmp_path):
    """The command of the documentation."""
    (tmp_path / "train.py").write_text(KEPT)
    keeper = ("--standalone", "--nproc-per-node=3", "-m", "lightning_hetero.keeper", "--max-restarts=2")
    with open(tmp_path / "log", "w+") as log:
        process = subprocess.Popen(
            [str(part) for part in (TORCHRUN, *keeper, tmp_path / "train.py", tmp_path)],
            env={**os.environ, **COMMON, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )
        try:
            process.wait(150)
        finally:
            kill_group(process)
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0, text[-5000:]
    assert re.search(r"step 6 .*workers 0, 2\b", text)
    ends = [torch.load(tmp_path / f"done-{slot}", weights_only=False) for slot in range(3)]
    assert all((weights == ends[0]).all() for weights in ends)


@LAUNCHED
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a worker with its keeper on Linux")
def test_a_worker_ends_with_its_keeper():
    code = """
import sys, torch.distributed as dist
from lightning_hetero.comm.membership.slots import SlotBoard
from lightning_hetero.keeper import Keeper
worker = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
Keeper([sys.executable, "-c", worker], SlotBoard(dist.HashStore()), slot=0, slots=1).run()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(worker).wait(timeout=30)
    assert not psutil.pid_exists(worker)


# a process that is stopped for ever


class Stops(Fault):
    """The process stands still, and its launcher kills it at last."""

    def strike(self, injector, loss):
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def _stops(rank, mode, still, folder):
    rank_monitor.SETTINGS = rank_monitor.MonitorSettings(period_s=0.2, poll_s=0.05, quiet_s=1.0, lost_s=3.0)
    logging.getLogger("lightning_hetero").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    injector = Injector(Stops(still), rank, folder)
    MODES[mode].train(rank, MODES[mode].settings, injector)


@pytest.mark.slow("waits for seconds until a process counts as lost")
@pytest.mark.parametrize("still", [0, 1])
@pytest.mark.parametrize("mode", ["plain", "elastic", "accelerate", "fabric", "transformers"])
def test_a_process_that_is_stopped_for_ever_is_named_and_ends_the_job_in_every_front_end(tmp_path, mode, still):
    """Rank 0 holds the store, which then does not answer."""
    errors = run_ranks(_stops, 2, mode, still, tmp_path, timeout=60, expect_errors=True)
    found = {rank: text for rank, _, text in errors}
    assert "signal 9" in found[still]
    assert "code 1" in found[1 - still]
    said = (tmp_path / f"{1 - still}.log").read_text().splitlines()
    named = [re.findall(r"rank \d", line)[:2] for line in said]
    assert named.count([f"rank {1 - still}", f"rank {still}"]) >= 2, "that it waits, and that it ends"


# trainings that are told to end

TOLD = [
    ("script", "lightning", "stale", "one"),
    ("torchrun", "lightning", "elastic", "launcher"),
    ("torchrun", "lightning", "fsdp", "all"),
    ("slurm", "lightning", "plain", "all"),
    ("launch", "accelerate", "plain", "launcher"),
    ("launch", "transformers", "plain", "all"),
    ("torchrun", "fabric", "plain", "one"),
    ("torchrun", "own", "plain", "launcher"),
]


def wrong(outcome):
    return {name: text for name, text in vars(outcome).items() if text and name != "seconds"}


@LAUNCHED
@pytest.mark.parametrize(("launcher", "front_end", "mode", "whom"), TOLD)
def test_a_training_that_is_told_to_end_saves_and_ends(launcher, front_end, mode, whom):
    """``benchmarks/preemption.py`` has all cases, and tells each training at many random moments."""
    outcome = run(launcher, front_end, mode, whom, random.Random(f"{launcher} {front_end} {mode}"))
    assert not wrong(outcome), wrong(outcome)


# workers that fail again and again: the benchmark, which keeps an account of samples


@pytest.mark.slow("five faults of a training under keepers, each of which takes seconds")
@pytest.mark.timeout(280)
def test_no_sample_is_lost_in_some_faults(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fit, chaos, job = map(importlib.import_module, ("_lossy_fit", "chaos", "_lossy_job"))
    given = (fit.fit, fit.WORKERS, tmp_path, 0.0005, False)
    function = partial(run_kept, *given, restarts=100, silence=2.0, timeout=240.0)
    kinds = ["kill", "link cut", "freeze", "pause", "segfault"]
    *found, total = chaos.train(job.Job(tmp_path, Forked(function, {})), random.Random(1), kinds, 0.3, 3)
    assert sorted(row["kind"] for row in found) == sorted(kinds)
    assert total["events"] == len(kinds)
    assert total["lives"] >= 4 + 3, "three were started again"
    assert total["samples"] == 960 * total["epochs"]


if __name__ == "__main__":
    _saves(Path(sys.argv[1]), epochs=12)
