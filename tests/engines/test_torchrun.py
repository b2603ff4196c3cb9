"""torchrun: killed workers, workers that leave and come; every sample is accounted for, and nothing is left behind.

A step that a checkpoint holds is done; what a killed attempt did after its last checkpoint is done again.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import yaml
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import get_args_parser

from tests.engines.script import POINTS, SAMPLES, main
from tests.helpers import free_port, run_ranks
from tests.warm.interpreter import warmed

SCRIPT = Path(__file__).with_name("script.py")
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.fixture
def start(tmp_path):
    """Starts torchrun with arguments; all that it started is ended after the test."""
    started = []

    def _start(*arguments, epochs=2, warm=False):
        # With the agent's own store, workers that start again may meet addresses of those that were killed.
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [TORCHRUN, "--monitor-interval=0.2", *arguments, SCRIPT, tmp_path, 4, epochs]
        with open(tmp_path / f"log-{len(started)}", "w") as log:
            process = subprocess.Popen(
                warmed(*command) if warm else list(map(str, command)),
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield _start
    for process in started:
        kill_group(process)


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


def wait_for(condition, folder, limit):
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit} s; the logs end with\n{logs(folder)}")
        time.sleep(0.1)


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
    runs = attempts(folder)
    starts = [head["start"] for head, _ in runs]
    assert starts == sorted(starts)
    for epoch in range(epochs):
        taken = []
        for (_, steps), following in zip(runs, [*starts[1:], 10**9], strict=True):
            taken += [i for s in steps if s["epoch"] == epoch and s["step"] < following for i in s["indices"]]
        assert sorted(taken) == list(range(SAMPLES)), epoch


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
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return run_ranks(_agent, 1, tmp_path, restarts, timeout=60, env=env, expect_errors=True)

    yield _agent_of
    for pid in workers_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def workers_of(folder):
    """Workers that are still there; a process that began after a worker wrote its file only has the same number."""
    found = []
    for path in folder.glob("pid-*"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(path.name.removeprefix("pid-")))
            found += [process.pid] if process.create_time() <= path.stat().st_mtime + 5 else []
    return found


@pytest.mark.parametrize("point", POINTS)
def test_workers_killed_and_started_again(agent, tmp_path, point):
    second = 0 if point == "writing" else 1  # rank 0 writes
    assert agent(f"0 {point} 3\n{second} {point} 14\n", restarts=2) == []
    assert json.loads((tmp_path / "done").read_text()) == {"step": 24, "world": 2}
    check_samples(tmp_path, 2)
    known = [len(head["known"]) for head, _ in attempts(tmp_path)]
    assert len(known) == 3
    assert known[0] == 0
    assert known[2] == 2, "time models are known after a restart"
    assert workers_of(tmp_path) == []


@pytest.mark.parametrize("point", POINTS)
def test_more_kills_than_restarts_are_an_error(agent, tmp_path, point):
    [(_, kind, message)] = agent(f"0 {point} 7\n", restarts=0)
    assert kind == "ChildFailedError"
    assert "Signal 9 (SIGKILL) received" in message
    assert not (tmp_path / "done").exists()
    assert workers_of(tmp_path) == []


def test_the_command_starts_a_killed_worker_again(start, tmp_path):
    (tmp_path / "kill").write_text("1 backward 5\n")
    process = start("--standalone", "--nproc_per_node=2", "--max-restarts=1", epochs=1, warm=True)
    wait_for(lambda: process.poll() is not None, tmp_path, 100)
    assert process.returncode == 0, logs(tmp_path)
    assert json.loads((tmp_path / "done").read_text()) == {"step": 12, "world": 2}
    check_samples(tmp_path, 1)
    assert len(attempts(tmp_path)) == 2
    assert workers_of(tmp_path) == []


@pytest.mark.alone
def test_a_machine_leaves_and_another_comes(start, tmp_path):
    """Two machines, one is switched off, the other goes on alone, a third joins."""
    (tmp_path / "slow").touch()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=elastic")
    timeouts = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=100"
    arguments = ("--nnodes=1:3", "--nproc_per_node=1", "--max-restarts=5", *rendezvous, timeouts)

    def reached(world, after=0):
        runs = attempts(tmp_path)
        return len(runs) > after and runs[-1][0]["world"] == world and len(runs[-1][1]) >= 4 * world

    first = start(*arguments, epochs=12)
    time.sleep(1)
    second = start(*arguments, epochs=12)
    wait_for(lambda: reached(2), tmp_path, 100)
    kill_group(second)
    before = len(attempts(tmp_path))
    wait_for(lambda: reached(1, before), tmp_path, 100)
    third = start(*arguments, epochs=12)
    before = len(attempts(tmp_path))
    wait_for(lambda: reached(2, before), tmp_path, 100)
    (tmp_path / "slow").unlink()
    wait_for(lambda: first.poll() is not None and third.poll() is not None, tmp_path, 100)
    assert (first.returncode, third.returncode) == (0, 0), logs(tmp_path)
    check_samples(tmp_path, 12)
    worlds = [head["world"] for head, _ in attempts(tmp_path)]
    assert attempts(tmp_path)[-1][0]["known"], "time models are known after restarts"
    assert worlds[-1] == 2
    assert 1 in worlds


def documented_commands():
    """Every torchrun command on the page of engines and in its examples, and the one of the manifest."""
    page = Path(__file__).parents[2] / "docs" / "engines.md"
    joined = page.read_text().replace("\\\n", " ")
    yield from re.findall(r"^torchrun (.+)$", joined, re.M)
    manifest = yaml.safe_load_all(re.search(r"```yaml\n(.+?)```", joined, re.S)[1])
    job = next(part for part in manifest if part["kind"] == "Job")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "torchrun"
    yield " ".join(command[1:])


def test_documented_commands_are_understood_by_torchrun():
    commands = list(documented_commands())
    assert len(commands) == 5
    for command in commands:
        arguments = get_args_parser().parse_args(command.removesuffix("&").split())
        assert arguments.training_script == "train.py", command
        assert not arguments.training_script_args, command
        assert arguments.rdzv_backend == ("c10d" if arguments.rdzv_endpoint else "static"), command
