"""``lightning-hetero plan`` and ``simulate`` as a user types them: tables, JSON, pictures, errors, and their speed."""

import json
import os
import subprocess
import sys
import threading

import pytest

from lightning_hetero import cli
from lightning_hetero.simulate.planning import Given, plan_cluster, read_cluster, simulate_cluster

B = ["B", "--workload", "resnet50-imagenet", "--total-batch", "1024", "--link", "10Gbit"]


@pytest.fixture
def run(capsys):
    """Runs a command: exit code, what it wrote, and its errors."""

    def _run(*arguments):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
        written = capsys.readouterr()
        return code, written.out, written.err

    return _run


def test_a_plan_as_json_is_that_of_the_python_interface(run):
    code, text, _ = run("plan", *B, "--json")
    given = Given(workload="resnet50-imagenet", rate=1.25e9, total_batch_size=1024)
    assert code == 0
    assert json.loads(text) == {"plan": plan_cluster(read_cluster("B", given)).to_dict(), "before": None}


def test_workers_are_added_and_left_out(run):
    code, text, _ = run("plan", *B, "--drop", "8xRTX6000", "--add", "2xA100", "--json")
    found = json.loads(text)
    assert code == 0
    names = [worker["name"] for worker in found["plan"]["workers"]]
    assert names == ["A100"] * 4 + ["V100"] * 4 + ["A100"] * 2
    assert len(found["before"]["workers"]) == 16
    code, text, _ = run("plan", *B, "--drop", "8xRTX6000", "--price", "1")
    assert "before the change: 16 workers" in text
    assert "an epoch costs" in text


def test_a_simulation(run):
    code, text, _ = run("simulate", *B, "--jitter", "0.03", "--steps", "100")
    assert code == 0
    assert "within 5 % of the optimum  after" in text
    code, again, _ = run("simulate", *B, "--jitter", "0.03", "--steps", "100", "--json")
    found = json.loads(again)
    assert found["steps"] == 100
    assert sum(found["plans"][-1]["local_batch_sizes"]) == 1024


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture(run, tmp_path, command, ending):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.{ending}" for name in ("one", "two")]
    for file in files:
        assert run(command, *B, "--picture", str(file))[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_all_names_are_listed(run, command):
    code, text, _ = run(command, "--list")
    assert code == 0
    assert all(name in text for name in ("RTX 2080 Ti", "gpt2-wikitext103", "HeteroGPU"))


def test_a_simulation_says_what_an_epoch_takes_and_costs(run):
    arguments = ["simulate", *B, "--steps", "20", "--price", "2", "--samples", "1M"]
    code, text, _ = run(*arguments)
    assert code == 0
    assert "for 1000000 samples, costs" in text
    found = json.loads(run(*arguments, "--json")[1])
    seconds = 1e6 / found["samples_per_second"]
    assert found["epoch"]["seconds"] == pytest.approx(seconds)
    assert found["epoch"]["cost"] == pytest.approx(found["epoch"]["price_per_hour"] * seconds / 3600)
    assert "its cost needs the price of T4" in run("simulate", "2xT4", "--workload", "bert-squad", "--steps", "5")[1]


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["which cluster?", "4xA100,8xRTX6000"]),
        (["3xA10", "--workload", "bert-squad"], ["'A10' is unknown", "Did you mean A100"]),
        (["A", "--workload", "bert"], ["--workload", "'bert' is unknown", "bert-squad"]),
        (["A"], ["depends on the model", "--workload"]),
        (["A", "--workload", "bert-squad", "--total-batch", "2"], ["cannot give each of 3 workers"]),
        (["A", "--workload", "bert-squad", "--total-batch", "many"], ["--total-batch", "'many'"]),
        (["A", "--workload", "bert-squad", "--link", "100"], ["--link", "100Mbit"]),
        (["A", "--workload", "bert-squad", "--model", "124M"], ["--model", "params=124M"]),
        (["A", "--workload", "bert-squad", "--price", "A100=x"], ["'x' is not a number"]),
        (["A", "--workload", "bert-squad", "--drop", "A4001"], ["no worker 'A4001'", "Did you mean A4000"]),
        (["A", "--workload", "bert-squad", "--add", "A4001"], ["'A4001' is unknown", "Did you mean A4000"]),
        (["A", "--workload", "bert-squad", "--picture", "x.gif"], ["--picture", ".png, .svg, .pdf"]),
        (["A", "--workload", "bert-squad", "--picture", "/no/x.png"], ["--picture", "a folder that exists"]),
        (
            ["A", "--workload", "bert-squad", "--add", "1000000000xT4"],
            ["the number of workers, '1000000000' is out of range", "from 1 to 100000"],
        ),
        (["A", "--workload", "bert-squad", "--price", "A500=3"], ["no worker 'A500'", "Did you mean A5000"]),
        (["A", "--workload", "bert-squad", "--drop", "2xA4000"], ["only 1 worker 'A4000'"]),
        (["A", "--workload", "bert-squad", "--add", "T4", "--drop", "T4"], ["no worker 'T4' to leave out"]),
        (["2xA100", "--workload", "cnn-mnist"], ["the total batch size is not known", "--total-batch"]),
        (["no.yaml"], ["no.yaml: No such file"]),
        (["A", "--total-batch", "-5"], ["--total-batch", "'-5' is negative", "whole number from 1"]),
        (["A", "--link", "-1Gbit"], ["--link", "'-1Gbit' is negative", "100Mbit"]),
        (["A", "--link", "1e-300Gbit"], ["--link", "out of range", "from 1bit to"]),
        (["A", "--link", "nan"], ["--link", "not a finite number"]),
        (["A", "--latency", "-1ms"], ["--latency", "negative", "1.5ms"]),
        (["A", "--jitter", "1e308"], ["--jitter", "out of range", "from 0 to 1", "0.03 for 3 %"]),
        (["A", "--total-batch", "1e300"], ["--total-batch", "out of range", "1e+12"]),
        (["A", "--workload", "bert-squad", "--price", "A5000="], ["--price A5000=:", "'' is not a number"]),
        (["A", "--workload", "bert-squad", "--price", "1e308"], ["--price 1e308:", "out of range"]),
        (["A", "--workload", "bert-squad", "--drop", ""], ["--drop '' names no worker"]),
        (["A", "--workload", "bert-squad", "--drop", "0xA5000"], ["'0' is out of range"]),
        (["A", "--workload", "bert-squad", "--add", ""], ["--add ''", "names no worker"]),
        (["A", "--workload", "bert-squad", "--add", "0xT4"], ["'0' is out of range"]),
        (["A", "--workload", "bert-squad", "--picture", "/proc/x.png"], ["--picture /proc/x.png", "can be written"]),
    ],
)
def test_an_error_says_what_is_allowed(run, command, arguments, words):
    code, _, errors = run(command, *arguments)
    assert code == 2
    assert "Traceback" not in errors
    text = " ".join(errors.split())
    assert all(word in text for word in words), text


def test_the_static_policy_splits_by_the_speed_of_the_table(run, tmp_path):
    code, written, _ = run("simulate", *B, "--policy", "static", "--steps", "20", "--json")
    assert code == 0
    sizes = json.loads(written)["plans"][-1]["local_batch_sizes"]
    assert sizes[0] / sizes[-1] == pytest.approx(3.42, rel=0.05)
    path = tmp_path / "own.yaml"
    path.write_text("total_batch_size: 8\nworkers: [{name: mine, q: 0.001, s: 0, k: 0.001, m: 0}]\n")
    code, _, errors = run("simulate", str(path), "--policy", "static")
    assert code == 2
    assert "not known of 'mine'" in errors


def test_who_reads_may_stop():
    program = "import sys; from lightning_hetero.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "plan", *B]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""


def test_an_unknown_policy_is_refused(run):
    code, _, errors = run("simulate", *B, "--policy", "best")
    assert code == 2
    assert "perf_model" in errors


MIXED = "2xA100,2xT4"


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--latency", "2ms"], {"latency": 2e-3}),
        (["--jitter", "0.1"], {"jitter": 0.1}),
        (["--samples", "5k"], {"samples": 5000}),
        (["--price", "A100=3", "--price", "T4=0.5"], {"prices": {"A100": 3.0, "T4": 0.5}}),
        (["--workload", "bert-squad"], {"workload": "bert-squad"}),
    ],
)
def test_each_option_is_one_of_the_python_interface(run, options, given):
    code, text, _ = run("plan", MIXED, "--workload", "resnet50-imagenet", "--link", "1Gbit", *options, "--json")
    plain = {"workload": "resnet50-imagenet", "rate": 125e6}
    before, after = (plan_cluster(read_cluster(MIXED, Given(**own))).to_dict() for own in (plain, {**plain, **given}))
    assert code == 0
    assert json.loads(text)["plan"] == after != before


@pytest.mark.parametrize(
    ("options", "given"),
    [(["--seed", "3"], {"seed": 3}), (["--seed", "0"], {}), (["--policy", "even"], {"policy": "even"})],
)
def test_a_simulation_has_the_seed_and_the_policy_that_are_given(run, options, given):
    code, text, _ = run(
        "simulate", MIXED, "--workload", "bert-squad", "--jitter", "0.1", "--steps", "9", *options, "--json"
    )
    cluster = read_cluster(MIXED, Given(workload="bert-squad", jitter=0.1))
    assert code == 0
    assert json.loads(text) == json.loads(json.dumps(simulate_cluster(cluster, steps=9, **given).to_dict()))


def test_a_cluster_may_come_through_a_pipe(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("workload: bert-squad\nworkers: [2 x A100]\n",))
    writer.start()
    code, text, _ = run("plan", str(pipe))
    writer.join()
    assert code == 0
    assert "2 workers" in text
