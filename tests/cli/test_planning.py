"""``lightning-hetero plan`` and ``simulate`` as a user types them: JSON, pictures, errors."""

import json
from functools import partial

import pytest

from lightning_hetero.simulate import Given, plan_cluster, read_cluster, simulate_cluster
from tests.cli.ran import ran

B = "B --workload resnet50-imagenet --total-batch 1024 --link 10Gbit"
MIXED = "2xA100,2xT4"


@pytest.fixture
def run(capsys):
    """Runs a command of some words: exit code, what it wrote, and its errors."""
    return lambda line: partial(ran, capsys)(*line.split())


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ("", {}),
        ("--latency 2ms", {"latency": 2e-3}),
        ("--samples 5k", {"samples": 5000}),
        ("--price A100=3 --price T4=0.5", {"prices": {"A100": 3.0, "T4": 0.5}}),
        ("--workload bert-squad", {"workload": "bert-squad"}),
    ],
)
def test_a_plan_as_json_is_that_of_the_python_interface(run, options, given):
    code, text, _ = run(f"plan {MIXED} --workload resnet50-imagenet --link 1Gbit {options} --json")
    plain = {"workload": "resnet50-imagenet", "rate": 125e6}
    before, after = (plan_cluster(read_cluster(MIXED, Given(**own))).to_dict() for own in (plain, {**plain, **given}))
    assert code == 0
    assert json.loads(text) == {"plan": after, "before": None}
    assert (after != before) is bool(given)


@pytest.mark.parametrize(
    ("options", "given"),
    [("--seed 3", {"seed": 3}), ("--policy even", {"policy": "even"})],
)
def test_a_simulation_as_json_is_that_of_the_python_interface(run, options, given):
    code, text, _ = run(f"simulate {MIXED} --workload bert-squad --jitter 0.1 --steps 9 {options} --json")
    cluster = read_cluster(MIXED, Given(workload="bert-squad", jitter=0.1))
    assert code == 0
    assert json.loads(text) == json.loads(json.dumps(simulate_cluster(cluster, steps=9, **given).to_dict()))


def test_workers_are_added_and_left_out(run):
    code, text, _ = run(f"plan {B} --drop 8xRTX6000 --add 2xA100 --json")
    found = json.loads(text)
    assert code == 0
    assert [worker["name"] for worker in found["plan"]["workers"]] == ["A100"] * 4 + ["V100"] * 4 + ["A100"] * 2
    assert len(found["before"]["workers"]) == 16


@pytest.mark.parametrize("line", [f"plan {B} --drop 8xRTX6000 --price 1", f"simulate {B} --steps 9", "plan --list"])
def test_tables_have_the_names_of_the_workers(run, line):
    code, text, _ = run(line)
    assert code == 0
    assert "A100" in text
    assert "V100" in text


@pytest.mark.parametrize(("command", "ending", "start"), [("plan", "png", b"\x89PNG"), ("simulate", "svg", b"<?xml")])
def test_a_picture_is_the_same_each_time(run, tmp_path, command, ending, start):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.{ending}" for name in ("one", "two")]
    for file in files:
        assert run(f"{command} {B} --picture {file}")[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(start)


A = "A --workload bert-squad"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["which cluster", "4xA100"]),
        ("no.yaml", ["no.yaml"]),
        ("2xA100 --workload cnn-mnist", ["--total-batch"]),
        (f"{A} --total-batch 2", ["3 workers"]),
        ("A --link -1Gbit", ["--link", "'-1Gbit'"]),
        ("A --jitter 1e308", ["--jitter", "from 0 to 1"]),
        (f"{A} --model 124M", ["--model", "params=124M"]),
        (f"{A} --price A5000=2 --price a5000=3", ["second price"]),
        (f"{A} --price A500=3", ["'A500'", "Did you mean A5000"]),
        (f"{A} --drop 2xA4000", ["only 1"]),
        (f"{A} --add 1000000000xT4", ["'1000000000'", "100000"]),
        (f"{A} --picture x.gif", ["--picture", ".png, .svg, .pdf"]),
    ],
)
def test_an_error_names_the_option_and_what_is_allowed(run, arguments, words):
    for command in ("plan", "simulate"):
        code, _, errors = run(f"{command} {arguments}")
        text = " ".join(errors.split())
        assert code == 2, text
        assert "Traceback" not in text
        assert [word for word in words if word not in text] == [], text


def test_the_static_policy_splits_by_the_speed_of_the_table(run):
    _, written, _ = run(f"simulate {B} --policy static --steps 20 --json")
    sizes = json.loads(written)["plans"][-1]["local_batch_sizes"]
    assert sizes[0] / sizes[-1] == pytest.approx(3.42, rel=0.05)
