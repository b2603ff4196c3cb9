"""``lightning-hetero launch`` and ``config``, and real launches of scripts for plain Accelerate."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException

from lightning_hetero import cli
from lightning_hetero.accelerate.plugin import NAMES
from lightning_hetero.cli.launch import read_config
from tests.ranks import free_port

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "accelerate" / "flag_scripts"


def gpus(monkeypatch, count):
    for module in (torch.cuda, getattr(torch, "accelerator", torch.cuda)):
        monkeypatch.setattr(module, "device_count", lambda: count)
        monkeypatch.setattr(module, "is_available", lambda: count > 0)


@pytest.fixture
def started(monkeypatch):
    """What Accelerate would start, after it has read and checked its own file; on a machine without GPUs."""
    seen = []
    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", seen.append)
    gpus(monkeypatch, 0)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    monkeypatch.setattr(os, "environ", kept)
    return seen


def config_file(folder, **settings):
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "config.yaml")


def refused(*arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hetero_policy", "fastest"], "--hetero_policy fastest"),
        (["--hetero_density", "7"], "--hetero_density 7"),
        (["--hetero_density="], "--hetero_density"),
        (["--config_file", "/nowhere.yaml"], "--config_file /nowhere.yaml"),
        (["--config_file", "section.yaml"], "hetero_config"),
        (["--config_file", "replan.yaml"], "hetero_config.replan=never"),
        (["--config_file", "two.yaml"], "--main_process_ip"),
        (["--config_file", "plan.yaml"], "distributed_type"),
        (["--cpu", "--tpu"], "--tpu"),
        (["--cpu", "--num_processes", "0"], "--num_processes 0"),
        (["--cpu", "--num_machines", "2"], "--machine_rank and --main_process_ip"),
        (["--num_processes", "2"], "--cpu"),  # they would train alone, one beside the other
        (["--config_file", "alone.yaml"], "--cpu"),
    ],
    ids=str,
)
def test_a_bad_flag_or_file_is_named_before_anything_starts(arguments, says, tmp_path, monkeypatch, capsys, started):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelerate.commands.launch.default_config_file", "none.yaml")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "none.yaml")
    two = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 4, "num_machines": 2, "machine_rank": 1}
    contents = {
        "section": {"hetero_config": 3},
        "replan": {"hetero_config": {"replan": "never"}},
        "plan": {"workers": 3},
        "two": two,
        "alone": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 3},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    refused("launch", *arguments, "script.py")
    assert says in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("config", "options", "variables"),
    [
        ({"use_cpu": True, "num_processes": 3}, (), {}),
        ({"distributed_type": "MULTI_CPU", "num_processes": 3}, (), {}),
        ({"num_processes": 3}, (), {"ACCELERATE_USE_CPU": "yes"}),
        ({"distributed_type": "NO", "num_processes": 3}, ("--cpu",), {}),
        ({"num_processes": 3, "main_process_ip": "10.0.0.1", "machine_rank": 1}, ("--cpu", "--num_machines", "3"), {}),
    ],
    ids=str,
)
def test_several_cpu_workers_are_started_together(config, options, variables, tmp_path, started):
    os.environ.update(variables)
    path = config_file(tmp_path, compute_environment="LOCAL_MACHINE", **config)
    assert cli.main(["launch", "--config_file", path, *options, "script.py"]) == 0
    assert [(given.num_processes, int(given.machine_rank or 0)) for given in started] == [
        (3, config.get("machine_rank", 0))
    ]
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_a_launch_that_is_told_to_end_ends_with_the_code_of_the_signal(monkeypatch, capsys, started):
    def stopped(arguments):
        raise SignalException("process got a signal", signal.SIGTERM)

    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", stopped)
    assert cli.main(["launch", "--cpu", "--num_processes", "2", "script.py"]) == 143
    told = capsys.readouterr().err
    assert "SIGTERM" in told
    assert "Traceback" not in told


def test_a_launch_says_when_torch_will_not_call_us(monkeypatch, caplog, started):
    monkeypatch.setattr("lightning_hetero.frontend.log.log.propagate", True)
    launch = ["launch", "--multi_gpu", "--num_processes", "2", "--cpu", "script.py"]
    cli.main(launch)
    assert "AUTOLOAD" not in caplog.text
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    cli.main(launch)
    assert len(started) == 2
    assert "AUTOLOAD" in caplog.text


def test_the_launchers_help_shows_every_option_of_ours_and_accelerates(capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", "--multi_gpu", "--config_file", "run.yaml", "--help"])
    words = [word.rstrip(",") for word in capsys.readouterr().out.split() if word.startswith("-")]
    assert {f"--hetero_{name}" for name in NAMES} <= set(words)
    theirs = [set(action.option_strings) for action in launch_command_parser()._actions if action.option_strings]
    assert len(theirs) > 100
    assert not [names for names in theirs if not names & set(words)]


def test_without_accelerate_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "lightning_hetero.cli.launch")
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", None)
    assert cli.main(["launch", "script.py"]) == 2
    assert "lightning-hetero[accelerate]" in capsys.readouterr().err


# the questions of `config`


def asked(monkeypatch, path, *answers):
    """Type answers, an empty line for each that is left out at the end."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(answers) + "\n" * 20))
    return cli.main(["config", "--config_file", str(path)])


def test_config_asks_again_what_is_wrong_and_launch_reads_its_file(tmp_path, monkeypatch, capsys, started):
    path = tmp_path / "my run.yaml"
    machines = ("0", "4", "3", "2", "2", "1", "", "10.0.0.7", "99999", "29511")
    settings = ("perf_model", "24,12", "24,12,16,8", "", "", "", "", "gzip", "block_topk", "3", "0.05")
    assert asked(monkeypatch, path, *machines, "maybe", "true", "fp64", "no", *settings) == 0
    told = capsys.readouterr()
    wrong = ("num_processes='0'", "num_machines='3'", "machine_rank='2'", "main_process_ip=''", "use_cpu='maybe'")
    wrong += ("main_process_port='99999'", "precision='fp64'", "local_batch_sizes=[24, 12]", "'gzip'", "density=3")
    assert [text for text in wrong if text not in told.err] == []
    assert "'my run.yaml'" in told.out.replace(f"{tmp_path}/", ""), "how to start, with a name of several words"
    expected = {"local_batch_sizes": [24, 12, 16, 8], "compression": "block_topk", "density": 0.05}
    assert read_config(str(path))[1] == expected
    cli.main(["launch", "--config_file", str(path), "script.py"])
    given = started[0]
    assert (given.num_machines, given.machine_rank, given.num_processes) == (2, 1, 4)
    assert (given.main_process_ip, given.main_process_port) == ("10.0.0.7", 29511)
    variables = [os.environ[f"ACCELERATE_HETERO_{name}"] for name in ("COMPRESSION", "DENSITY")]
    assert variables == ["block_topk", "0.05"]


@pytest.mark.parametrize(("count", "kind", "on_cpu"), [(0, "MULTI_CPU", True), (3, "MULTI_GPU", False)])
def test_default_answers_fit_the_machine(count, kind, on_cpu, tmp_path, monkeypatch, started):
    gpus(monkeypatch, count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    monkeypatch.setattr("lightning_hetero.hardware.Path", lambda path: tmp_path / "no quota")
    path = tmp_path / "config.yaml"
    assert asked(monkeypatch, path) == 0
    config, section = read_config(str(path))
    assert (config["num_processes"], config["use_cpu"], config["distributed_type"]) == (3, on_cpu, kind)
    assert section == {}


# real launches

PLAIN = """
import json, sys
from torch import nn
from accelerate import Accelerator
from toy import loaders, model_and_optimizer

accelerator = Accelerator()
(loader, _), (model, optimizer) = loaders(int(sys.argv[1])), model_and_optimizer()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    history = [e.plan.local_batch_sizes for e in getattr(accelerator, "plan_history", ())]
    weights = [w for p in model.parameters() for w in p.flatten().tolist()]
    print(json.dumps({"weights": weights, "processes": accelerator.num_processes, "history": history}), flush=True)
accelerator.end_training()
"""
CHANGES = {  # the two lines that a script for plain Accelerate changes
    "from accelerate import Accelerator": "from lightning_hetero.accelerate import HeteroAccelerator",
    "accelerator = Accelerator()": "accelerator = HeteroAccelerator()",
}


def execute(*command, limit=120, **env):
    """Exit code and output of a command; its processes are ended if it takes longer."""
    defaults = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    defaults["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, SCRIPTS)))
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, **defaults, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} was not done within {limit} s; it printed:\n{output}")
    return process.returncode, output


def torchrun(*arguments, processes=2, **env):
    return execute(BIN / "torchrun", f"--nproc_per_node={processes}", f"--master_port={free_port()}", *arguments, **env)


def launched(*arguments, **env):
    return execute(BIN / "lightning-hetero", "launch", "--main_process_port", free_port(), *arguments, **env)


def result_of(run):
    code, output = run
    assert code == 0, output
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.fixture
def scripts(tmp_path):
    """A script for plain Accelerate, and the same with two lines changed."""
    changed = PLAIN
    for before, after in CHANGES.items():
        assert changed.count(before) == 1
        changed = changed.replace(before, after)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "hetero.py").write_text(changed)
    return tmp_path / "plain.py", tmp_path / "hetero.py"


SIZES = {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "13,3"}
FLAG = {"ACCELERATE_USE_HETERO": "true"}


def from_file(folder, script):
    base = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 2}
    path = config_file(folder, **base, use_cpu=True, hetero_config={"local_batch_sizes": [13, 3]})
    return launched("--config_file", path, "--hetero_replan", "epoch", script, 8)


def by_accelerate(script):
    command = BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", free_port()
    return execute(*command, script, 8, **FLAG, **SIZES)


def by_ours(script):
    return launched("--cpu", "--num_processes", 2, "--hetero_local_batch_sizes", "13,3", script, 8)


LAUNCHERS = {
    "ours": lambda folder, plain, hetero: by_ours(plain),
    "torchrun, two changed lines": lambda folder, plain, hetero: torchrun(hetero, 8, **SIZES),
    "torchrun, the flag": lambda folder, plain, hetero: torchrun(plain, 8, **FLAG, **SIZES),
    "accelerate launch, the flag": lambda folder, plain, hetero: by_accelerate(plain),
    "a section of the config file": lambda folder, plain, hetero: from_file(folder, hetero),
}


@pytest.mark.slow("starts interpreters")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_the_result_of_one_process(launcher, scripts, tmp_path):
    one = result_of(execute(sys.executable, scripts[0], 16))
    two = result_of(LAUNCHERS[launcher](tmp_path, *scripts))
    assert (one["processes"], two["processes"], two["history"]) == (1, 2, [[13, 3]])
    np.testing.assert_allclose(two["weights"], one["weights"], rtol=1e-12)


@pytest.mark.slow("Accelerate's own test script, as `accelerate test` runs it")
def test_accelerates_own_test_script_passes(tmp_path):
    """Its trainings have a total batch of 16, split unevenly here, and must equal one process."""
    script = tmp_path / "run.py"
    script.write_text("import accelerate.test_utils.scripts.test_script as script\nscript.main()\n")
    base = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 2}
    path = config_file(tmp_path, **base, use_cpu=True, hetero_config={"local_batch_sizes": [12, 4]})
    code, output = launched("--config_file", path, script)
    assert code == 0, output
    assert output.count("12/4 of 16") >= output.count("Training yielded the same results") > 1


@pytest.mark.slow("starts two processes by torchrun, twice")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate joins processes over the GPUs of this machine")
def test_the_flag_turns_it_off_and_a_process_that_accelerate_would_leave_alone_says_so(scripts):
    _, output = torchrun(scripts[0], 8, ACCELERATE_USE_HETERO="false", **SIZES)  # plain gloo may crash when it ends
    assert json.loads(next(line for line in output.splitlines() if line.startswith("{")))["history"] == []
    code, output = torchrun(scripts[1], 8, ACCELERATE_USE_CPU="false")
    assert code != 0
    assert "WORLD_SIZE=2" in output
    assert "ACCELERATE_USE_CPU=true" in output


def test_a_script_that_fails_ends_the_launch_with_its_code(tmp_path, capfd, started):
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(7)\n")
    assert cli.main(["launch", "--cpu", "--num_processes", "1", str(tmp_path / "bad.py")]) == 7
    assert "exit code 7" in capfd.readouterr().err
