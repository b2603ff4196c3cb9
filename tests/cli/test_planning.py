"""``lightning-hetero plan`` and ``simulate`` as a user types them: tables, JSON, pictures, errors, and their speed."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import pytest

from lightning_hetero import cli
from lightning_hetero.simulate.planning import Given, plan_cluster, read_cluster, simulate_cluster
from lightning_hetero.simulate.planning.units import parse_model
from tests.learned import knowing

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


def test_a_plan_as_a_table(run):
    code, text, _ = run("plan", *B, "--price", "2")
    assert code == 0
    for words in ("B: 16 workers, total batch 1024", "4 x A100", "8 x RTX6000", "times as fast", "95 % needs", "costs"):
        assert words in text, text


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


def test_a_file_knows_what_added_workers_train(run, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("workload: bert-squad\ntotal_batch_size: 32\nworkers: [A100]\n")
    code, text, _ = run("plan", str(file), "--add", "2xT4", "--json")
    assert code == 0
    assert len(json.loads(text)["plan"]["workers"]) == 3


def test_the_size_of_a_model_goes_before_that_of_the_workload(run):
    _, text, _ = run("plan", *B, "--model", "params=124M", "--json")
    given = Given("resnet50-imagenet", parse_model("params=124M"), 1.25e9, total_batch_size=1024)
    assert json.loads(text)["plan"]["step_time"] == plan_cluster(read_cluster("B", given)).step_time


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


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_lists_as_json(run, command):
    code, text, _ = run(command, "--list", "--json")
    found = json.loads(text)
    assert code == 0
    assert {"name": "T4", "tflops": 4.9034}.items() <= next(d for d in found["devices"] if d["name"] == "T4").items()
    assert "bert-squad" in [workload["name"] for workload in found["workloads"]]
    assert found["clusters"][0] == {"name": "A", "what": ANY, "workers": ["A5000", "A4000", "P4000"]}


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


TWINS = "total_batch_size: 8\nworkers: [{q: 1, s: 0, k: 1, m: 0, name: a}, {q: 3, s: 0, k: 1, m: 0, name: a}]\n"


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_different_devices_of_one_name_are_told_apart(run, tmp_path, command):
    (tmp_path / "twins.yaml").write_text(TWINS)
    code, text, _ = run(command, str(tmp_path / "twins.yaml"))
    assert code == 0
    assert "\na #1 " in text
    assert "\na #2 " in text


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_long_and_wide_names_keep_the_table_readable(run, tmp_path, command):
    name, times = "x" * 300, "q: 1, s: 0, k: 1, m: 0"
    text = f"total_batch_size: 8\nworkers: [{{{times}, name: {name}}}, {{{times}, name: größe 日本}}]\n"
    (tmp_path / "names.yaml").write_text(text)
    code, text, _ = run(command, str(tmp_path / "names.yaml"))
    assert code == 0
    long, wide = (line for line in text.splitlines() if line.startswith(("xxx", "größe")))
    assert "xxx...xxx" in long
    assert len(long) == len(wide) + 2 < 130


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_slowest_and_the_fastest_that_is_allowed(run, tmp_path, command):
    (tmp_path / "far.yaml").write_text(
        "total_batch_size: 1e6\nlink: 1Mbit\nmodel: bytes=1MB\nworkers:\n"
        "  - {name: slow, q: 1e9, s: 1e9, k: 1e9, m: 1e9, price: 1e9, jitter: 1}\n"
        "  - {name: fast, q: 1e-3, s: 0, k: 0, m: 0}\n"
    )
    for more in ((), ("--link", "1000000Tbit"), ("--link", "inf", "--total-batch", "2")):
        code, text, errors = run(command, str(tmp_path / "far.yaml"), *more)
        assert (code, errors) == (0, "")
        assert max(map(len, text.splitlines())) < 140
        assert not re.search(r"\bnan\b|\binf\b", text)


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("slow", ["{device: A100}", "{name: slow, q: 1e9, s: 0, k: 0, m: 0}"])
def test_times_that_no_sum_can_hold_are_refused(run, tmp_path, command, slow):
    text = f"workload: bert-squad\nlink: 1bit\nworkers:\n  - {slow}\n  - {{name: fast, q: 1e-12, s: 0, k: 0, m: 0}}\n"
    (tmp_path / "far.yaml").write_text(text)
    code, _, errors = run(command, str(tmp_path / "far.yaml"))
    assert code == 2
    assert "too different to compute with" in errors
    assert "Check the workers' times, the model's size and the link's rate." in errors


def test_one_is_no_plural(run):
    arguments = ["A100", "--workload", "bert-squad"]
    assert "A100: 1 worker, " in run("simulate", *arguments, "--steps", "1")[1]
    assert ", 1 step\n" in run("simulate", *arguments, "--steps", "1")[1]
    assert "before the change: 1 worker, " in run("plan", *arguments, "--add", "T4")[1]
    assert "all but an A100: " in run("plan", "A100,T4", *arguments[1:], "--link", "1Mbit")[1]


def test_what_is_too_long_to_simulate_is_refused(run):
    code, _, errors = run("simulate", *B, "--steps", "1e12")
    assert code == 2
    assert "from 1 to 100000" in errors


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


def test_too_many_workers_in_a_file(run, tmp_path):
    path = tmp_path / "many.yaml"
    path.write_text("workload: bert-squad\nworkers:\n  - {device: T4, count: 1000000000}\n")
    code, _, errors = run("plan", str(path))
    assert code == 2
    assert "many.yaml:3" in errors
    assert "from 1 to 100000" in errors


def test_all_workers_can_be_replaced(run):
    arguments = ["A", "--workload", "bert-squad", "--drop", "A5000,A4000,P4000", "--add", "2xT4", "--json"]
    code, written, _ = run("plan", *arguments)
    assert code == 0
    assert [worker["name"] for worker in json.loads(written)["plan"]["workers"]] == ["T4", "T4"]


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


def test_nothing_idles_less_than_not_at_all(run):
    code, written, _ = run("plan", "A100", "--workload", "resnet50-imagenet")
    assert code == 0
    assert "-0.0" not in written


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


def distinct(path, count):
    lines = [
        f"  - {{name: w{i}, q: {1e-3 + i * 1e-7:.6g}, s: 0.01, k: 2e-3, m: 0.01, jitter: 0.03}}" for i in range(count)
    ]
    path.write_text(f"model: params=25M\nlink: 100Gbit\ntotal_batch_size: {20 * count}\nworkers:\n" + "\n".join(lines))


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_thousand_workers_take_two_seconds_of_the_processor(command, tmp_path):
    """Start-up included, by the processor's time: the clock's depends on what else runs here."""
    file = tmp_path / "many.yaml"
    distinct(file, 1000)
    code = (
        "import resource, sys, time; from lightning_hetero.cli import main\n"
        f"code = main([{command!r}, {str(file)!r}])\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules\n"
        "used = resource.getrusage(resource.RUSAGE_SELF); sys.stderr.write(str(used.ru_utime + used.ru_stime))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 2.0


def test_ten_thousand_workers_take_twenty_seconds(run, tmp_path):
    file = tmp_path / "many.yaml"
    distinct(file, 10_000)
    begin = time.process_time()
    assert run("plan", str(file))[0] == 0
    assert time.process_time() - begin < 20


PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
SHOWN = re.findall(r"^```console\n\$ lightning-hetero (.+)\n((?s:.*?))^```$", PAGE, re.M)
SLIP = "workload: resnet50-imagenet\nworkers:\n  - 2 x A100\n  - 4 x RTX600\n"


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_page_shows_what_the_command_writes(run, command, shown, tmp_path, monkeypatch):
    (tmp_path / "cluster.yaml").write_text(re.search(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)[1])
    (tmp_path / "slip.yaml").write_text(SLIP)
    monkeypatch.chdir(tmp_path)
    _, text, errors = run(*command.split())
    assert (text or errors) == shown


def test_the_page_shows_commands():
    assert len(SHOWN) == 5


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


def test_all_that_is_added_and_left_out_counts_and_is_priced(run):
    changes = ["--add", "T4", "--add", "V100", "--drop", "A100", "--drop", "T4", "--price", "2"]
    cluster = [MIXED, "--workload", "bert-squad", "--jitter", "0.1", *changes, "--json"]
    plan = json.loads(run("plan", *cluster)[1])["plan"]
    assert [worker["name"] for worker in plan["workers"]] == ["A100", "T4", "T4", "V100"]
    known = read_cluster(
        "A100,2xT4,V100",
        Given(workload="bert-squad", jitter=0.1, prices={"*": 2.0}, total_batch_size=plan["total_batch_size"]),
    )
    assert plan == plan_cluster(known).to_dict()
    assert json.loads(run("simulate", *cluster)[1])["names"] == ["A100", "T4", "T4", "V100"]


def test_the_picture_of_a_simulation_is_that_of_its_steps(run, monkeypatch):
    drawn = []
    monkeypatch.setattr("lightning_hetero.cli.simulate.draw_split", lambda *given: drawn.append(given))
    assert run("simulate", MIXED, "--workload", "bert-squad", "--steps", "30", "--picture", "x.svg")[0] == 0
    ((steps, sizes, shares, names, path, title),) = drawn
    result = simulate_cluster(read_cluster(MIXED, Given(workload="bert-squad")), steps=30).result
    assert (sizes == result.sizes).all()
    assert (shares == result.optimum / result.exact).all()
    assert min(shares) < 1
    assert (list(steps), names, path, title) == (list(range(30)), ("A100", "A100", "T4", "T4"), "x.svg", MIXED)


def test_the_recorded_file_of_the_page_can_be_planned(run, tmp_path):
    file = tmp_path / "run.json"
    (recorded,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S)
    file.write_text(recorded)
    code, text, _ = run("plan", str(file))
    assert code == 0
    assert "2 workers, total batch 256" in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize(
    ("arguments", "program", "unbuffered"),
    [
        (["plan", *B], "lightning-hetero plan", ""),
        (["plan", *B], "lightning-hetero plan", "1"),
        (["plan", "--help"], "lightning-hetero plan", ""),
        (["--help"], "lightning-hetero", ""),
    ],
)
def test_a_full_disk_is_said(arguments, program, unbuffered):
    code = "import sys; from lightning_hetero.cli import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code, *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert found.returncode == 1
    assert found.stderr == f"{program}: No space left on device; free some space, or write to another place.\n"


def test_a_cluster_may_come_through_a_pipe(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("workload: bert-squad\nworkers: [2 x A100]\n",))
    writer.start()
    code, text, _ = run("plan", str(pipe))
    writer.join()
    assert code == 0
    assert "2 workers" in text


def test_the_state_of_a_planner_may_come_through_a_pipe(run, tmp_path):
    state = knowing({"one": (1e-3, 0.01, 2e-3, 0.02), "two": (3e-3, 0.01, 6e-3, 0.02)}).state_dict()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(state),))
    writer.start()
    code, text, _ = run("plan", str(pipe), "--total-batch", "64", "--link", "inf")
    writer.join()
    assert code == 0
    assert "2 workers" in text


def test_a_cluster_of_thousands_of_equal_devices_needs_little_memory(run):
    code, text, _ = run("plan", "5000xA100", "--workload", "gpt2-wikitext103", "--total-batch", "100k")
    assert code == 0
    assert "unlimited; 78.5 Gbit/s would give 95 %" in text
