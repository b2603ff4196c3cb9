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
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import get_args_parser

from lightning_hetero.comm.failures import rank_monitor
from tests.kept import Forked, run_kept
from tests.preemption import runs
from tests.promises.faults import MODES, Fault, Injector
from tests.promises.saving_script import POINTS, SAMPLES, main
from tests.ranks import free_port, run_ranks

LAUNCHED = pytest.mark.slow("starts launchers and workers, which takes seconds, and kills them")
ROOT = Path(__file__).parents[2]
SCRIPT, TORCHRUN = Path(__file__).with_name("saving_script.py"), Path(sys.executable).with_name("torchrun")
COMMON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def kill_group(process):
    """End an agent and its workers at once, as a machine that is switched off does."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    for victim in [process, *children]:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
    process.wait()


def logs(folder):
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*")))


def wait_for(condition, folder, limit=100):
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit} s; the logs end with\n{logs(folder)}")
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path):
    """Starts a command; all that it started is ended after the test."""
    started = []

    def _start(*command, **env):
        with open(tmp_path / f"log-{len(started)}", "w") as log:
            process = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **COMMON, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield _start
    for process in started:
        kill_group(process)


def torchrun(folder, *arguments, epochs=2):
    return [TORCHRUN, "--monitor-interval=0.2", *arguments, SCRIPT, folder, 4, epochs]


# With the agent's own store, workers that start again may meet addresses of those that were killed.
ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def attempts(folder):
    """For each attempt, its first line and the steps of all ranks."""
    found = {}
    for path in sorted(folder.glob("attempt-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if lines:
            head, steps = found.setdefault(path.name.split("-")[1], (lines[0], []))
            steps.extend(lines[1:])
    return [found[name] for name in sorted(found)]


def check_samples(folder, epochs):
    """Of each attempt counts what came before the step at which the next one went on."""
    found = attempts(folder)
    starts = [head["start"] for head, _ in found]
    assert starts == sorted(starts)
    for epoch in range(epochs):
        taken = []
        for (_, steps), following in zip(found, [*starts[1:], 10**9], strict=True):
            taken += [i for s in steps if s["epoch"] == epoch and s["step"] < following for i in s["indices"]]
        assert sorted(taken) == list(range(SAMPLES)), epoch


def workers_of(folder):
    """Workers that are still there; a process that began after a worker wrote its file only has the same number."""
    found = []
    for path in folder.glob("pid-*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(path.name.removeprefix("pid-")))
            found += [process.pid] if process.create_time() <= path.stat().st_mtime + 5 else []
    return found


# torchrun and SLURM


def _agent(_rank, folder, restarts):
    """What ``torchrun --standalone --nproc_per_node=2`` does, with workers that are forked: they need not import."""
    warnings.simplefilter("default")  # Lightning warns of a folder with checkpoints in it
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
    elastic_launch(config, main)(folder, 4, 2)


@pytest.fixture
def agent(tmp_path):
    """Runs an agent on a script that holds itself to the file ``kill``; its errors. No worker outlives the test."""

    def _agent_of(kills, restarts):
        (tmp_path / "kill").write_text(kills)
        return run_ranks(_agent, 1, tmp_path, restarts, timeout=60, env=ANEW, expect_errors=True, start="fork")

    yield _agent_of
    for pid in workers_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


@LAUNCHED
@pytest.mark.parametrize("point", POINTS)
def test_workers_killed_and_started_again(agent, tmp_path, point):
    second = 0 if point == "writing" else 1  # rank 0 writes
    assert agent(f"0 {point} 3\n{second} {point} 14\n", restarts=2) == []
    assert json.loads((tmp_path / "done").read_text()) == {"step": 24, "world": 2}
    check_samples(tmp_path, 2)
    known = [len(head["known"]) for head, _ in attempts(tmp_path)]
    assert len(known) == 3
    assert (known[0], known[2]) == (0, 2), "time models are known after a restart"
    assert workers_of(tmp_path) == []


@LAUNCHED
@pytest.mark.parametrize("point", ["backward", "writing"])
def test_more_kills_than_restarts_are_an_error(agent, tmp_path, point):
    [(_, kind, message)] = agent(f"0 {point} 7\n", restarts=0)
    assert kind == "ChildFailedError"
    assert "Signal 9 (SIGKILL) received" in message
    assert not (tmp_path / "done").exists()
    assert workers_of(tmp_path) == []


@LAUNCHED
def test_the_command_starts_a_killed_worker_again(start, tmp_path):
    (tmp_path / "kill").write_text("1 backward 5\n")
    command = torchrun(tmp_path, "--standalone", "--nproc_per_node=2", "--max-restarts=1", epochs=1)
    process = start(*command, **ANEW)
    wait_for(lambda: process.poll() is not None, tmp_path)
    assert process.returncode == 0, logs(tmp_path)
    assert json.loads((tmp_path / "done").read_text()) == {"step": 12, "world": 2}
    check_samples(tmp_path, 1)
    assert len(attempts(tmp_path)) == 2
    assert workers_of(tmp_path) == []


@LAUNCHED
@pytest.mark.timeout(600)
def test_a_machine_leaves_and_another_comes(start, tmp_path):
    """Two machines, one is switched off, the other goes on alone, a third joins."""
    (tmp_path / "slow").touch()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=elastic")
    timeouts = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=100"
    arguments = ("--nnodes=1:3", "--nproc_per_node=1", "--max-restarts=5", *rendezvous, timeouts)
    command = torchrun(tmp_path, *arguments, epochs=12)

    def reached(world, after=0):
        found = attempts(tmp_path)
        return len(found) > after and found[-1][0]["world"] == world and len(found[-1][1]) >= 4 * world

    first = start(*command, **ANEW)
    time.sleep(1)
    second = start(*command, **ANEW)
    wait_for(lambda: reached(2), tmp_path)
    kill_group(second)
    before = len(attempts(tmp_path))
    wait_for(lambda: reached(1, before), tmp_path)
    third = start(*command, **ANEW)
    before = len(attempts(tmp_path))
    wait_for(lambda: reached(2, before), tmp_path)
    (tmp_path / "slow").unlink()
    wait_for(lambda: first.poll() is not None and third.poll() is not None, tmp_path)
    assert (first.returncode, third.returncode) == (0, 0), logs(tmp_path)
    check_samples(tmp_path, 12)
    assert attempts(tmp_path)[-1][0]["known"], "time models are known after restarts"
    worlds = [head["world"] for head, _ in attempts(tmp_path)]
    assert worlds[-1] == 2
    assert 1 in worlds


@LAUNCHED
def test_two_tasks_find_each_other_by_slurms_variables(start, tmp_path):
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, SCRIPT, tmp_path, 4, 1]
    tasks = [start(*command, **slurm, SLURM_PROCID=str(task), SLURM_LOCALID=str(task)) for task in range(2)]
    wait_for(lambda: all(task.poll() is not None for task in tasks), tmp_path)
    assert [task.returncode for task in tasks] == [0, 0], logs(tmp_path)
    assert json.loads((tmp_path / "done").read_text()) == {"step": 12, "world": 2}
    check_samples(tmp_path, 1)


def documented_commands():
    """Every torchrun command on the page of engines and in its examples, and the one of the manifest."""
    joined = (ROOT / "docs" / "engines.md").read_text().replace("\\\n", " ")
    yield from re.findall(r"^torchrun (.+)$", joined, re.M)
    manifest = yaml.safe_load_all(re.search(r"```yaml\n(.+?)```", joined, re.S)[1])
    job = next(part for part in manifest if part["kind"] == "Job")
    yield " ".join(job["spec"]["template"]["spec"]["containers"][0]["command"][1:])


def test_documented_commands_are_understood_by_torchrun():
    commands = list(documented_commands())
    assert len(commands) >= 5
    for command in commands:
        arguments = get_args_parser().parse_args(command.removesuffix("&").split())
        assert (arguments.training_script, arguments.training_script_args) == ("train.py", []), command
        assert arguments.rdzv_backend == ("c10d" if arguments.rdzv_endpoint else "static"), command


# keepers

KEPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from tests.helpers import Points, Regressor, fit
folder = Path(sys.argv[1])

class Dies(Regressor):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)  # the newcomer comes before the end
        if batch_idx == 6 and os.environ["LIGHTNING_HETERO_SLOT"] == "1" and os.environ["LIGHTNING_HETERO_LIFE"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

done = fit(int(os.environ["RANK"]), "hetero_ddp", 3, 4, model=Dies(), dataset=Points(192), max_epochs=20)
torch.save(done["weights"], folder / f"done-{os.environ['LIGHTNING_HETERO_SLOT']}")
"""


@LAUNCHED
def test_torchrun_with_keepers_goes_on_without_a_killed_worker(start, tmp_path):
    """The command of the documentation."""
    (tmp_path / "train.py").write_text(KEPT)
    keeper = ("--standalone", "--nproc-per-node=3", "-m", "lightning_hetero.keeper", "--max-restarts=2")
    process = start(TORCHRUN, *keeper, tmp_path / "train.py", tmp_path, PYTHONPATH=str(ROOT))
    wait_for(lambda: process.poll() is not None, tmp_path, 150)
    text = (tmp_path / "log-0").read_text()
    assert process.returncode == 0, text[-5000:]
    assert "worker 1 was lost" in text
    assert "training goes on in step 6 with workers 0, 2" in text
    ends = {path.name: torch.load(path, weights_only=False) for path in tmp_path.glob("done-*")}
    assert set(ends) == {"done-0", "done-1", "done-2"}
    assert all((weights == ends["done-0"]).all() for weights in ends.values())


@LAUNCHED
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a worker with its keeper on Linux")
def test_a_worker_ends_with_its_keeper(start, tmp_path):
    code = f"""
import sys, torch.distributed as dist
from lightning_hetero.comm.membership.slots import SlotBoard
from lightning_hetero.keeper import Keeper
worker = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(60)"
Keeper([sys.executable, "-c", worker], SlotBoard(dist.HashStore()), slot=0, slots=1).run()
"""
    process = start(sys.executable, "-c", code)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), tmp_path)
    worker = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
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
    errors = run_ranks(_stops, 2, mode, still, tmp_path, timeout=60, expect_errors=True, start="fork")
    found = {rank: text for rank, _, text in errors}
    assert "signal 9" in found[still]
    assert "exit code 1" in found[1 - still]
    said = (tmp_path / f"{1 - still}.log").read_text()
    assert f"waits for rank {still}" in said
    assert f"which cannot go on: rank {still} is lost" in said


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
    outcome = runs.run(launcher, front_end, mode, whom, random.Random(f"{launcher} {front_end} {mode}"))
    assert not wrong(outcome), wrong(outcome)


@LAUNCHED
@pytest.mark.parametrize(("front_end", "counted"), [("deaf", ["hang"]), ("careless", ["code", "steps", "checkpoint"])])
def test_a_job_that_does_not_end_or_saves_nothing_is_counted(monkeypatch, front_end, counted):
    monkeypatch.setattr(runs, "END_S", 0.5 if front_end == "deaf" else runs.END_S)
    assert list(wrong(runs.run("slurm", front_end, "plain", "all", random.Random(0)))) == counted


# workers that fail again and again: the benchmark, and the account that it keeps of samples


@pytest.fixture(scope="module")
def benchmarks():
    """Import a benchmark; what it imports beside it is forgotten afterwards."""
    folder, before, paths = ROOT / "benchmarks", set(sys.modules), list(sys.path)
    sys.path.insert(0, str(folder))
    yield importlib.import_module
    sys.path[:] = paths
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in (folder, ROOT / "examples"):
            del sys.modules[name]


@pytest.mark.slow("five faults of a training under keepers, each of which takes seconds")
@pytest.mark.timeout(280)
def test_no_sample_is_lost_in_some_faults(benchmarks, tmp_path):
    fit, chaos = benchmarks("_lossy_fit"), benchmarks("chaos")
    given = (fit.fit, fit.WORKERS, tmp_path, 0.0005, False)
    function = partial(run_kept, *given, restarts=100, silence=2.0, timeout=240.0)
    kinds = ["kill", "link cut", "freeze", "pause", "segfault"]
    job = benchmarks("_lossy_job").Job(tmp_path, Forked(function, {}))
    *found, total = chaos.train(job, random.Random(1), kinds, 0.3, 3)
    assert sorted(row["kind"] for row in found) == sorted(kinds)
    assert total["events"] == len(kinds)
    assert total["lives"] >= 4 + 3, "three were started again"
    assert total["samples"] == 960 * total["epochs"]


def test_a_lost_sample_one_that_is_taken_twice_and_other_weights_are_errors(benchmarks, tmp_path):
    module = benchmarks("_lossy_job")

    def epoch(order):
        parts = [order[at : at + module.TOTAL] for at in range(0, len(order), module.TOTAL)]
        return [module.Step(0, (tuple(part),), 0.0) for part in parts]

    def account(steps, weights):
        where = {"generation": 0, "rank": 0, "time": 0.0}
        life = module.Life(0, 0, 1, 0.0, [{"start": 0, "world": 1, **where}])
        life.notes += [{"step": n, "epoch": 0, "samples": step.samples[0], **where} for n, step in enumerate(steps)]
        for slot in range(module.WORKERS):
            torch.save({"weights": weights[slot % len(weights)], "steps": len(steps)}, tmp_path / f"end-{slot}.pt")
        return module.account(
            type("Ended", (), {"folder": tmp_path, "lives": {"one": life}, "workers": module.WORKERS})
        )

    order = list(range(module.SAMPLES))
    right = epoch(order)
    weights = module.alone(right)
    assert account(right, [weights])[1:] == (0, 0.0)
    for changed, end, said in (
        ([7 if i == 5 else i for i in order], [weights], r"\[5\].*\[7\]"),
        (order[:-1], [weights], "31 samples"),
        (order[::-1], [weights], "weights differ"),
        (order, [weights, module.alone(right[:1])], "different weights"),
    ):
        with pytest.raises(module.LossError, match=said):
            account(epoch(changed), end)
