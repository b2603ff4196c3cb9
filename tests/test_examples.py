"""Every example runs as a user would run it, and says what it is there to show."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero.report.run_file import read_run

pytestmark = pytest.mark.slow(
    "starts interpreters and trains for seconds; one file for each front end is tested elsewhere"
)
EXAMPLES = Path(__file__).parents[1] / "examples"

FOLLOWS = r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)"

# Name of the example and the split that it ends with: a pattern, and the total batch.
SHOWN = {
    "quickstart": (r"^plan from epoch 0 step \d+: (\d+)/(\d+) of 80 samples \((?:first split|optimum|speed)", 80),
    "basic": (r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)", 256),
    "explicit_split": (r"split (170)/(86) from epoch 0 step 0: ", 256),
    "thin_link": (r"split (128)/(128) from epoch 0 step 0: ", 256),
    "pid": (r"split (\d+)/(\d+) from epoch \d+ step \d+: compute times", 256),
    "token_weights": (r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)", 128),
    "fabric": (FOLLOWS, 256),
    "accelerate_loop": (FOLLOWS, 256),
    "cli": (r"split (\d+)/(\d+) from epoch \d+ step \d+: compute times", 256),
    "torchrun": (FOLLOWS, 256),
    "mixed_devices": (FOLLOWS, 256),
    "fsdp": (FOLLOWS, 1024),
    "ray_train": (FOLLOWS, 256),
    "transformers_sft": (FOLLOWS, 32),
    "custom_planner": (r"split (\d+)/(\d+) from epoch 0 step \d+: by samples per second, once", 256),
}


# Examples that a launcher starts: its command, before the name of the script, and what comes after it.
BIN = Path(sys.executable).parent
TORCHRUN = [BIN / "torchrun", "--standalone", "--nproc_per_node=2"]
LAUNCHED = {
    "accelerate_loop": ([BIN / "lightning-hetero", "launch", "--config_file", EXAMPLES / "accelerate_loop.yaml"], []),
    "transformers_sft": ([BIN / "lightning-hetero", "launch", "--cpu", "--num_processes", "2"], []),
    "quickstart": ([sys.executable], ["hetero_ddp"]),
    "cli": ([sys.executable], ["fit", "--config", EXAMPLES / "cli.yaml"]),
    "torchrun": (TORCHRUN, ["{tmp}/{number}"]),
    "mixed_devices": (TORCHRUN, []),
}


def output_of(name, *arguments, limit, launcher=(sys.executable,)):
    """What an example prints; it must succeed within ``limit`` seconds, and all its processes are ended if not."""
    command = [*launcher, EXAMPLES / f"{name}.py", *arguments]
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
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
        pytest.fail(f"{name} was not done within {limit} s; it printed:\n{output}")
    assert process.returncode == 0, output
    return output


def test_every_example_is_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("_")}
    tested = Path(__file__).read_text()
    assert [name for name in sorted(names) if f'"{name}"' not in tested] == []


def first_that(shows, name, *arguments, tries=3, limit=120, launcher=(sys.executable,)):
    """Output of a run of which ``shows`` holds: on a machine busy with other work, scatter may keep the first plan.

    In arguments, ``{number}`` is that of the try, so that none goes on with what another has left.
    """
    for number in range(tries):
        given = [str(argument).format(number=number) for argument in arguments]
        output = output_of(name, *given, limit=limit, launcher=launcher)
        if shows(output):
            return output
    pytest.fail(f"{name} ran {tries} times and never showed it; it printed:\n{output}")


def test_elastic_merges_and_learns():
    output = output_of("elastic", limit=120)
    merges = re.findall(r"^epoch (\d) sample (\d+): updates \[(\d+), (\d+)\]", output, re.M)
    assert [(int(epoch), int(done)) for epoch, done, *_ in merges] == [
        (epoch, done) for epoch in range(3) for done in range(1600, 6401, 1600)
    ]
    assert all(int(first) + int(second) >= 25 for *_, first, second in merges)
    assert float(re.search(r"^precision at 1: ([\d.]+)$", output, re.M)[1]) > 0.1


@pytest.mark.parametrize("name", SHOWN)
def test_example(name, tmp_path):
    if name == "ray_train":
        pytest.importorskip("ray", reason="the ray extra is not installed")
    pattern, total = SHOWN[name]
    launcher, arguments = LAUNCHED.get(name, ([sys.executable], []))
    arguments = [str(a).replace("{tmp}", str(tmp_path)) for a in arguments]
    output = first_that(lambda output: re.search(pattern, output, re.M), name, *arguments, limit=180, launcher=launcher)
    assert sum(map(int, re.findall(pattern, output, re.M)[-1])) == total


def test_total_of_the_adaptive_example_grows():
    output = first_that(lambda output: re.search(r"^totals 32 -> \d+", output, re.M), "adaptive_batch")
    totals = [int(total) for total in re.search(r"^totals (.+)$", output, re.M)[1].split(" -> ")]
    assert 32 < totals[-1] <= 256, output
    steps, worth = map(int, re.search(r"^(\d+) steps, worth (\d+) at the initial total$", output, re.M).groups())
    assert steps < worth, output


def test_compression_sends_less():
    output = output_of("compression", limit=120)
    found = re.search(r"^sent ([\d.]+) kB a step, (\d+) times less than ([\d.]+) kB$", output, re.M)
    assert found, output
    assert int(found[2]) > 10


def test_density_of_the_example_falls_while_its_link_is_thin():
    pattern = r"^epoch (\d): [\d.e+]+ MB/s, density ([\d.]+)$"

    def falls(output):
        densities = [float(density) for _, density in re.findall(pattern, output, re.M)]
        return len(densities) == 3 and densities[1] < densities[0]

    first_that(falls, "fluctuating_link")


def test_demo_reports_and_draws(tmp_path):
    output = output_of("demo", "--quick", "--output", str(tmp_path), limit=180)
    splits = re.search(r"^split at the end +96/96/96 +(\d+)/(\d+)/(\d+)$", output, re.M)
    assert splits, output
    assert sum(map(int, splits.groups())) == 288
    trained = re.search(r"^samples trained on +(\d+) +(\d+)$", output, re.M)
    assert trained, output
    assert trained[1] == trained[2]
    accuracy = re.search(r"^test accuracy +([\d.]+)% +([\d.]+)%$", output, re.M)
    assert accuracy, output
    assert float(accuracy[1]) > 50, output
    assert float(accuracy[2]) == pytest.approx(float(accuracy[1]), abs=2.0), output  # one mathematics, other rounding
    for row in ("predicted step time", "measured step time", "speed-up, second half"):
        assert row in output
    # whether a busy machine lets twenty steps tell the three speeds apart is no promise; what is predicted then is less
    predicted = re.search(r"^predicted step time \(1\) +(\d+) ms +(?:(\d+) ms|-)$", output, re.M)
    assert predicted, output
    assert predicted[2] or set(splits.groups()) == {"96"}, output
    assert int(predicted[2] or 0) <= int(predicted[1]), output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"lightning-hetero report {tmp_path}" in output
    assert read_run(tmp_path).end.status == "finished"
