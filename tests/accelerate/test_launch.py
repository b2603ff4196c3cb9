"""Real launches: torchrun, ``accelerate launch``, ``lightning-hetero launch``; Accelerate's own test script."""

import io
import json
import os
import re
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
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_hetero import cli
from lightning_hetero.accelerate.plugin import NAMES
from lightning_hetero.cli import configure
from lightning_hetero.cli.configure import ask_settings
from lightning_hetero.cli.launch import hetero_environment, read_config
from tests.helpers import free_port
from tests.warm.interpreter import warmed

BIN = Path(sys.executable).parent

PLAIN = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator()
set_seed(0)
x = torch.randn(70, 4, dtype=torch.float64)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(4, 1, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True, generator=torch.Generator().manual_seed(5))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    weights = [p.tolist() for p in model.parameters()]
    history = [e.plan.local_batch_sizes for e in getattr(accelerator, "plan_history", ())]
    print(json.dumps({"weights": weights, "processes": accelerator.num_processes, "history": history}), flush=True)
accelerator.end_training()
"""

# The two lines that a script for plain Accelerate changes.
CHANGES = {
    "from accelerate import Accelerator": "from lightning_hetero.accelerate import HeteroAccelerator",
    "accelerator = Accelerator()": "accelerator = HeteroAccelerator()",
}


def execute(*command, limit=120, warm=True, **env):
    """Exit code and output of a command; its processes are ended if it takes longer.

    Each has to import torch if it is not ``warm``, and with it ours if the flag asks for it.
    """
    defaults = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        warmed(*command) if warm else list(map(str, command)),
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


def result_of(run):
    code, output = run
    assert code == 0, output
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.fixture
def scripts(tmp_path):
    """A script for plain Accelerate, and the same with two lines changed."""
    plain, hetero = tmp_path / "plain.py", tmp_path / "hetero.py"
    plain.write_text(PLAIN)
    text = PLAIN
    for before, after in CHANGES.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    hetero.write_text(text)
    return plain, hetero


def test_two_changed_lines_give_the_result_of_one_process(scripts):
    plain, hetero = scripts
    one = result_of(execute(sys.executable, plain, 16))
    two = result_of(torchrun(hetero, 8, ACCELERATE_HETERO_LOCAL_BATCH_SIZES="13,3"))
    assert (one["processes"], two["processes"], two["history"]) == (1, 2, [[13, 3]])
    for a, b in zip(one["weights"], two["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_accelerate_launch_with_the_environment(scripts):
    run = execute(
        *(BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", free_port()),
        *(scripts[1], 8),
        warm=False,
        ACCELERATE_HETERO_LOCAL_BATCH_SIZES="11,5",
    )
    assert result_of(run)["history"] == [[11, 5]]


def test_the_flag_alone_makes_an_unchanged_script_uneven(scripts):
    """By torchrun, ``accelerate launch`` and our launcher: the script is the one for plain Accelerate."""
    plain = scripts[0]
    one = result_of(execute(sys.executable, plain, 16))
    sizes = {"ACCELERATE_HETERO_LOCAL_BATCH_SIZES": "13,3"}
    launch = (BIN / "lightning-hetero", "launch", "--cpu", "--num_processes", 2, "--main_process_port", free_port())
    started = BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", free_port()
    runs = [
        torchrun(plain, 8, warm=False, ACCELERATE_USE_HETERO="true", **sizes),
        execute(*started, plain, 8, ACCELERATE_USE_HETERO="true", **sizes),
        execute(*launch, "--hetero_local_batch_sizes", "13,3", plain, 8),
    ]
    for run in runs:
        two = result_of(run)
        assert (two["processes"], two["history"]) == (2, [[13, 3]])
        for a, b in zip(one["weights"], two["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    _, output = torchrun(plain, 8, ACCELERATE_USE_HETERO="false", **sizes)  # plain gloo may crash when it ends
    off = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert off["history"] == []


def test_launch_with_a_section_in_the_config_file(scripts, tmp_path):
    path = tmp_path / "config.yaml"
    base = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 2}
    path.write_text(yaml.safe_dump({**base, "use_cpu": True, "hetero_config": {"local_batch_sizes": [11, 5]}}))
    launch = (BIN / "lightning-hetero", "launch", "--config_file", path, "--main_process_port", free_port())
    result = result_of(execute(*launch, "--hetero_replan", "epoch", scripts[1], 8, warm=False))
    assert (result["processes"], result["history"]) == (2, [[11, 5]])


def test_accelerates_own_test_script_passes(tmp_path):
    """What ``accelerate test`` runs, through our launcher: its trainings have a total batch of 16, split unevenly here,
    and must equal one process.
    """
    script = tmp_path / "run.py"
    script.write_text("import accelerate.test_utils.scripts.test_script as script\nscript.main()\n")
    config = tmp_path / "config.yaml"
    base = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 2}
    config.write_text(yaml.safe_dump({**base, "use_cpu": True, "hetero_config": {"local_batch_sizes": [12, 4]}}))
    launch = (BIN / "lightning-hetero", "launch", "--config_file", config, "--main_process_port", free_port())
    code, output = execute(*launch, script)
    assert code == 0, output
    assert output.count("Training yielded the same results on one CPU or distributed setup with batch split") > 1
    assert output.count("12/4 of 16 samples") >= output.count("Training yielded the same results") > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hetero_policy", "fastest"], "--hetero_policy fastest: policy='fastest' is unknown; allowed are"),
        (["--hetero_hysteresis", "7"], "--hetero_hysteresis 7: hysteresis=7"),
        (["--hetero_change_cost", "few"], "--hetero_change_cost few: change_cost='few'"),
        (["--hetero_max_total_batch_size", "0"], "--hetero_max_total_batch_size 0: max_total_batch_size=0"),
        (["--hetero_min_total_batch_size", "8"], "--hetero_min_total_batch_size 8: min_total_batch_size=8"),
        (["--hetero_lr_scaling", "cubic"], "--hetero_lr_scaling cubic: lr_scaling='cubic'"),
        (["--hetero_noise_scale", "3"], "--hetero_noise_scale 3: noise_scale=3"),
        (["--hetero_compression", "block_topk(density=7)"], "--hetero_compression block_topk(density=7): "),
        (["--hetero_density", "7"], "--hetero_density 7: "),
        (["--config_file", "/nowhere.yaml"], "--config_file /nowhere.yaml cannot be read"),
        (["--config_file", "binary.yaml"], "--config_file binary.yaml cannot be read: 'utf-8'"),
        (["--config_file", "two.yaml"], "num_machines=2 needs --main_process_ip, as options or in the config file."),
        (["--config_file", "plan.yaml"], "A `distributed_type` must be specified in the config file."),
        (["--cpu", "--tpu"], "You can only use one of `--cpu`, "),
        (
            ["--hetero_replan", "never"],
            "--hetero_replan never: replan='never' is unknown; allowed are 'auto', 'epoch' or a n",
        ),
        (["--hetero_density="], "--hetero_density has no value. Give one, or leave the option out."),
        (["--cpu", "--num_processes", "-2"], "--num_processes -2 is out of range; give an integer >= 1."),
        (["--cpu", "--num_processes", "0"], "--num_processes 0 is out of range"),
        (["--cpu", "--num_machines", "0"], "--num_machines 0 is out of range"),
        (
            ["--cpu", "--num_machines", "2"],
            "num_machines=2 needs --machine_rank and --main_process_ip, as",
        ),
        (
            ["--cpu", "--num_machines", "2", "--machine_rank", "1"],
            "num_machines=2 needs --main_process_ip, as options or in",
        ),
    ],
)
def test_a_bad_flag_is_named_before_anything_starts(arguments, message, tmp_path, monkeypatch, capsys, started):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "plan.yaml").write_text("workers: 3\n")
    two = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 4\nnum_machines: 2\nmachine_rank: 1\n"
    (tmp_path / "two.yaml").write_text(two)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["launch", *arguments, "script.py"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("usage: lightning-hetero launch [options] script [its arguments]\nlightning-hetero launch: ")
    assert not started


def test_a_machine_that_knows_its_place_is_started(tmp_path, started):
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nmain_process_ip: 10.0.0.1\nmachine_rank: 1\n")
    assert cli.main(["launch", "--cpu", "--config_file", str(path), "--num_machines", "2", "script.py"]) == 0
    assert [(given.num_machines, int(given.machine_rank)) for given in started] == [(2, 1)]


def test_a_launch_that_is_no_group_of_processes_is_left_to_accelerate(tmp_path, monkeypatch, started):
    monkeypatch.setattr("lightning_hetero.cli.launch.launch_command", started.append)
    assert cli.main(["launch", "--tpu", "--tpu_cluster", "--num_machines", "2", "script.py"]) == 0
    assert cli.main(["launch", "--use_deepspeed", "--num_machines", "2", "script.py"]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\nmpirun_config: {mpirun_ccl: '1'}\n"
    )
    assert cli.main(["launch", "--config_file", str(path), "script.py"]) == 0
    assert [given.machine_rank for given in started] == [None] * 3


def test_a_flag_goes_before_a_variable_before_the_section():
    section, exported = {"policy": "static", "replan": 5, "hysteresis": 0.1}, {"ACCELERATE_HETERO_REPLAN": "6"}
    variables = hetero_environment(section, {"policy": "pid"}, exported)
    assert variables == {
        "ACCELERATE_USE_HETERO": "true",
        "ACCELERATE_HETERO_POLICY": "pid",
        "ACCELERATE_HETERO_REPLAN": "6",
        "ACCELERATE_HETERO_HYSTERESIS": "0.1",
    }


def test_a_weight_function_is_left_to_the_workers():
    exported = {"ACCELERATE_HETERO_WEIGHT_FN": "not_here:count"}
    assert hetero_environment({}, {}, exported) == {"ACCELERATE_USE_HETERO": "true"}


def test_a_moving_total_by_flags():
    flags = {"max_total_batch_size": "4096", "lr_scaling": "mine:rule", "noise_scale": "true"}
    assert hetero_environment({}, flags, {}) == {
        "ACCELERATE_USE_HETERO": "true",
        **{"ACCELERATE_HETERO_" + name.upper(): text for name, text in flags.items()},
    }
    with pytest.raises(ValueError, match="--hetero_min_total_batch_size 8: .* has no meaning where the total stays"):
        hetero_environment({}, {"min_total_batch_size": "8"}, {})
    with pytest.raises(ValueError, match="--hetero_lr_scaling cubic: lr_scaling='cubic' is unknown"):
        hetero_environment({"max_total_batch_size": 64}, {"lr_scaling": "cubic"}, {})


def test_sections_are_checked(tmp_path):
    with pytest.raises(TypeError, match="hetero_config has no setting speed. Allowed are policy"):
        hetero_environment({"speed": 3}, {}, {})
    with pytest.raises(ValueError, match="hetero_config.replan=never: replan='never' is unknown"):
        hetero_environment({"replan": "never"}, {}, {})
    with pytest.raises(ValueError, match="ACCELERATE_HETERO_REPLAN=never: replan='never'"):
        hetero_environment({}, {}, {"ACCELERATE_HETERO_REPLAN": "never"})
    path = tmp_path / "config.yaml"
    path.write_text("hetero_config: 3\n")
    with pytest.raises(ValueError, match="must be a table of settings"):
        read_config(str(path))


def answer(monkeypatch, *answers):
    """Type answers, an empty line for each that is left out at the end."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(answers) + "\n" * 20))


@pytest.fixture
def started(monkeypatch):
    """What `accelerate launch` would start, after it has read and checked its own file."""
    seen = []
    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", seen.append)
    for name in list(os.environ):
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return seen


def test_config_asks_and_launch_reads_it(tmp_path, monkeypatch, capsys, started):
    path = tmp_path / "config.yaml"
    answer(monkeypatch, "2", "", "true", "", "pid", "", "100", "", "sometimes", "epoch")
    assert cli.main(["config", "--config_file", str(path)]) == 0
    assert "replan='sometimes' is unknown" in capsys.readouterr().err
    config, section = read_config(str(path))
    assert section == {"policy": "pid", "max_local_batch_sizes": 100, "replan": "epoch"}
    assert (config["num_processes"], config["distributed_type"]) == (2, "MULTI_CPU")
    answer(monkeypatch, "even")
    assert cli.main(["config", "--config_file", str(path)]) == 0
    assert read_config(str(path)) == (config, {"policy": "even"})
    cli.main(["launch", "--config_file", str(path), "script.py"])
    assert started[0].num_processes == 2
    assert os.environ["ACCELERATE_HETERO_POLICY"] == "even"


def test_launch_says_when_torch_will_not_call_us(monkeypatch, caplog, started):
    monkeypatch.setattr("lightning_hetero.frontend.log.log.propagate", True)
    launch = ["launch", "--multi_gpu", "--num_processes", "2", "--cpu", "script.py"]
    cli.main(launch)
    assert "AUTOLOAD" not in caplog.text
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    cli.main(launch)
    assert len(started) == 2
    assert "Accelerator() stays a plain one" in caplog.text


def test_config_of_several_machines_and_compression(tmp_path, monkeypatch, capsys, started):
    path = tmp_path / "config.yaml"
    machines = ("4", "3", "2", "2", "1", "", "10.0.0.7", "99999", "29511")
    settings = ("perf_model", "24,12", "24,12,16,8", "", "", "", "", "gzip", "block_topk", "3", "0.05")
    answer(monkeypatch, *machines, "maybe", "true", "fp64", "no", *settings)
    assert cli.main(["config", "--config_file", str(path)]) == 0
    told = capsys.readouterr().err
    for wrong in (
        "num_machines='3' is unknown; allowed are '1', '2', '4'",
        "machine_rank='2' is out of range; give an integer from 0 to 1",
        "main_process_ip='' is no address",
        "main_process_port='99999' is out of range; give an integer from 1 to 65535",
        "use_cpu='maybe' is unknown; allowed are 'true', 'false'",
        "mixed_precision='fp64' is unknown. Did you mean 'fp16'? Allowed are 'no', 'fp16', 'bf16'",
        "local_batch_sizes=[24, 12] has 2 entries for 4 workers",
        "compression='gzip' is unknown; allowed are 'block_topk'",
        "density=3",
    ):
        assert wrong in told
    assert read_config(str(path))[1] == {
        "local_batch_sizes": [24, 12, 16, 8],
        "compression": "block_topk",
        "density": 0.05,
    }
    cli.main(["launch", "--config_file", str(path), "script.py"])
    given = started[0]
    assert (given.num_machines, given.machine_rank, given.num_processes) == (2, 1, 4)
    assert (given.main_process_ip, given.main_process_port) == ("10.0.0.7", 29511)
    assert os.environ["ACCELERATE_HETERO_COMPRESSION"] == "block_topk"
    assert os.environ["ACCELERATE_HETERO_DENSITY"] == "0.05"


@pytest.mark.parametrize(("gpus", "kind", "on_cpu"), [(0, "MULTI_CPU", True), (2, "MULTI_GPU", False)])
def test_default_answers_fit_the_machine(gpus, kind, on_cpu, tmp_path, monkeypatch, started):
    monkeypatch.setattr("lightning_hetero.cli.launch.devices", lambda: gpus)
    monkeypatch.setattr("lightning_hetero.hardware.cpu_share", lambda: 2.0)
    path = str(tmp_path / "config.yaml")
    answer(monkeypatch)
    assert cli.main(["config", "--config_file", path]) == 0
    config, section = read_config(path)
    assert (config["num_processes"], config["use_cpu"], config["distributed_type"]) == (2, on_cpu, kind)
    assert section == {}
    cli.main(["launch", "--config_file", path, "script.py"])
    assert [given.num_processes for given in started] == [2]
    assert os.environ.get("ACCELERATE_USE_CPU") == ("true" if on_cpu else None)


def test_one_worker_is_allowed_and_none_is_not(tmp_path, monkeypatch, capsys):
    path = str(tmp_path / "config.yaml")
    answer(monkeypatch, "0", "two", "1")
    assert cli.main(["config", "--config_file", path]) == 0
    told = capsys.readouterr().err
    assert "num_processes='0' is out of range; give an integer >= 1." in told
    assert "num_processes='two' is out of range; give an integer >= 1." in told
    assert read_config(path)[0]["num_processes"] == 1


def test_a_file_of_default_answers_trains_together(scripts, tmp_path):
    """On this machine, whatever it has; ACCELERATE_USE_CPU is left to the launcher."""
    path = tmp_path / "config.yaml"
    asked = subprocess.run(
        warmed(BIN / "lightning-hetero", "config", "--config_file", path),
        input="2" + "\n" * 20,
        text=True,
        check=True,
        timeout=60,
    )
    assert asked.returncode == 0
    launch = (BIN / "lightning-hetero", "launch", "--config_file", path, "--main_process_port", free_port())
    result = result_of(execute(*launch, "--hetero_local_batch_sizes", "11,5", scripts[1], 8, ACCELERATE_USE_CPU=""))
    assert (result["processes"], result["history"]) == (2, [[11, 5]])


@pytest.mark.parametrize(
    ("arguments", "gpus", "cure"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, 0, "give --cpu or write use_cpu: true"),
        ({"distributed_type": "NO", "num_processes": 3}, 0, "give --cpu"),
        ({"distributed_type": "NO", "num_processes": 2}, 2, "distributed_type: MULTI_GPU"),
        (["--num_processes", "2"], 0, "give --cpu"),
        (["--num_processes", "2", "--multi_gpu"], 0, "give --cpu"),
    ],
)
def test_workers_that_would_train_alone_are_not_started(arguments, gpus, cure, tmp_path, monkeypatch, capsys, started):
    monkeypatch.setattr("lightning_hetero.cli.launch.devices", lambda: gpus)
    monkeypatch.setattr("lightning_hetero.cli.launch._default_config", lambda: None)
    if isinstance(arguments, dict):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "use_cpu": False, **arguments}))
        arguments = ["--config_file", str(path)]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["launch", *arguments, "script.py"])
    assert stopped.value.code == 2
    assert cure in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("config", "options", "variables"),
    [
        ({"use_cpu": True, "num_processes": 3}, (), {}),
        ({"distributed_type": "MULTI_CPU", "num_processes": 3}, (), {}),
        ({"num_processes": 2}, ("--cpu", "--num_processes", "3"), {}),
        ({"num_processes": 3}, (), {"ACCELERATE_USE_CPU": "yes"}),
        ({"distributed_type": "NO", "num_processes": 3}, ("--cpu",), {}),
    ],
    ids=["use_cpu", "MULTI_CPU", "options go before the file", "exported", "NO with --cpu"],
)
def test_several_cpu_workers_are_started_together(config, options, variables, tmp_path, monkeypatch, started):
    monkeypatch.setattr("lightning_hetero.cli.launch.devices", lambda: 0)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **config}))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["launch", "--config_file", str(path), *options, "script.py"]) == 0
    assert [given.num_processes for given in started] == [3]
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_workers_that_fail_end_the_launch_with_one(monkeypatch, capsys, started):
    def failed(arguments):
        raise ChildFailedError("script.py", {1: ProcessFailure(1, 123, 9, "")})

    monkeypatch.setattr("lightning_hetero.cli.launch.launch_command", failed)
    assert cli.main(["launch", "--cpu", "--num_processes", "2", "script.py"]) == 1
    assert re.search(r"^lightning-hetero launch: (?s:.*)script.py FAILED", capsys.readouterr().err)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_launch_with_its_code_and_no_traceback(number, code, monkeypatch, capsys, started):
    def interrupted(arguments):
        raise SignalException("process got a signal", number)

    monkeypatch.setattr("lightning_hetero.cli.launch.launch_command", interrupted)
    assert cli.main(["launch", "--cpu", "--num_processes", "2", "script.py"]) == code
    assert capsys.readouterr().err == f"lightning-hetero launch: ended by {number.name}\n"


def test_what_the_launcher_cannot_use_is_named(tmp_path, monkeypatch, capsys, started):
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match="broken.yaml cannot be read: "):
        read_config(str(tmp_path / "broken.yaml"))
    monkeypatch.setenv("ACCELERATE_HETERO_POLCY", "pid")
    with pytest.raises(SystemExit):
        cli.main(["launch", "--cpu", "script.py"])
    assert (
        "ACCELERATE_HETERO_POLCY='pid' is no setting. Did you mean ACCELERATE_HETERO_POLICY" in capsys.readouterr().err
    )
    assert not started


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate joins processes over the GPUs of this machine")
def test_a_process_that_accelerate_would_leave_alone_says_so(scripts):
    code, output = torchrun(scripts[1], 8, ACCELERATE_USE_CPU="false")
    assert code != 0
    assert "WORLD_SIZE=2 processes were started, and Accelerate joins this one with none" in output
    assert "set ACCELERATE_USE_CPU=true" in output


@pytest.mark.parametrize("beside", [(), ("--multi_gpu", "--config_file", "run.yaml")], ids=["alone", "with options"])
def test_the_launchers_help_shows_every_option_of_ours_and_accelerates(beside, capsys):
    """Also with other options, and with no ``accelerate`` in ``sys.argv[0]``, by which Accelerate hides its own."""
    assert "accelerate" not in Path(sys.argv[0]).name
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", *beside, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: lightning-hetero launch [options] script [its arguments]\n")
    for name in NAMES:
        assert output.count(f"  --hetero_{name} VALUE") == 1
    entries = {word.rstrip(",") for line in output.splitlines() for word in line.split() if word.startswith("-")}
    theirs = [set(action.option_strings) for action in launch_command_parser()._actions if action.option_strings]
    assert len(theirs) > 100
    assert not [names for names in theirs if not names & entries]
    assert not [entry for entry in entries if entry.startswith("--") and "-" in entry[2:]]


def test_config_shows_how_to_start_with_a_name_of_several_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    answer(monkeypatch)
    assert cli.main(["config", "--config_file", "my run.yaml"]) == 0
    assert "start with: lightning-hetero launch --config_file 'my run.yaml' script.py" in capsys.readouterr().out


def test_config_writes_nothing_if_answers_end_early(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n"))
    assert cli.main(["config", "--config_file", str(tmp_path / "config.yaml")]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere/run.yaml", "nowhere/run.yaml: the folder "),
        (".", "cannot be written"),
        ("list.yaml", "is no Accelerate config file"),
        ("broken.yaml", "cannot be read: "),
        ("binary.yaml", "cannot be read: "),
        ("", "--config_file '' is no name"),
        ("n" * 300, "File name too long. Give another name."),
        ("list.yaml/run.yaml", "list.yaml/run.yaml: the folder "),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_the_first_question(path, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    answer(monkeypatch)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["config", "--config_file", path])
    assert stopped.value.code == 2
    written = capsys.readouterr()
    assert told in written.err
    assert not written.out


def test_the_workers_proposed_are_the_machines(monkeypatch):
    for gpus, cores, proposed in ((4, 2.0, "this one has 4 GPUs [4]"), (0, 3.9, "no GPU and 3.9 cores [3]")):
        monkeypatch.setattr("lightning_hetero.cli.launch.devices", lambda gpus=gpus: gpus)
        monkeypatch.setattr("lightning_hetero.hardware.cpu_share", lambda cores=cores: cores)
        asked = []
        config = configure._base(lambda question, asked=asked: asked.append(question) or "")
        assert proposed in asked[0]
        assert config["use_cpu"] == (gpus == 0)


def test_a_script_that_fails_ends_the_launch_with_its_code_and_no_traceback(tmp_path, capfd, started):
    (tmp_path / "bad.py").write_text("import sys\nsys.exit(7)\n")
    assert cli.main(["launch", "--cpu", "--num_processes", "1", str(tmp_path / "bad.py")]) == 7
    told = capfd.readouterr().err
    assert "the script ended with exit code 7" in told
    assert "Traceback" not in told


def test_each_question_says_what_an_empty_line_answers():
    asked = []
    assert ask_settings(lambda question: asked.append(question) or "") == {}
    assert asked
    assert not [question for question in asked if "[]" in question]


def test_a_fixed_split_takes_the_place_of_the_policy():
    answers = iter(["pid", "6,2", "", "", "", "", ""])
    assert ask_settings(lambda question: next(answers)) == {"local_batch_sizes": [6, 2]}


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "lightning_hetero.cli.launch")
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", None)
    assert cli.main(["launch", "script.py"]) == 2
    assert "Install it with: pip install 'lightning-hetero[accelerate]'" in capsys.readouterr().err
