"""Every example runs as a user would run it, and says what it is there to show."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

FOLLOWS = r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)"

# Name of the example and the split that it ends with: a pattern, and the total batch.
SHOWN = {
    "basic": (r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)", 256),
    "explicit_split": (r"split (170)/(86) from epoch 0 step 0: ", 256),
    "pid": (r"split (\d+)/(\d+) from epoch \d+ step \d+: compute times", 256),
    "token_weights": (r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)", 128),
    "fabric": (FOLLOWS, 256),
    "accelerate_loop": (FOLLOWS, 256),
    "cli": (r"split (\d+)/(\d+) from epoch \d+ step \d+: compute times", 256),
    "elastic": (FOLLOWS, 256),
    "mixed_devices": (FOLLOWS, 256),
    "ray_train": (FOLLOWS, 256),
    "custom_planner": (r"split (\d+)/(\d+) from epoch 0 step \d+: by samples per second, once", 256),
}


# Examples that a launcher starts: its command, before the name of the script, and what comes after it.
BIN = Path(sys.executable).parent
TORCHRUN = [BIN / "torchrun", "--standalone", "--nproc_per_node=2"]
LAUNCHED = {
    "accelerate_loop": ([BIN / "lightning-hetero", "launch", "--config_file", EXAMPLES / "accelerate_loop.yaml"], []),
    "cli": ([sys.executable], ["fit", "--config", EXAMPLES / "cli.yaml"]),
    "elastic": (TORCHRUN, ["{tmp}"]),
    "mixed_devices": (TORCHRUN, []),
}


def output_of(name, *arguments, limit, launcher=(sys.executable,)):
    """What an example prints; it must succeed within ``limit`` seconds, and all its processes are ended if not."""
    process = subprocess.Popen(
        list(map(str, [*launcher, EXAMPLES / f"{name}.py", *arguments])),
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
    assert names == {*SHOWN, "demo"}


@pytest.mark.parametrize("name", SHOWN)
def test_example(name, tmp_path):
    if name == "ray_train":
        pytest.importorskip("ray", reason="the ray extra is not installed")
    pattern, total = SHOWN[name]
    launcher, arguments = LAUNCHED.get(name, ([sys.executable], []))
    output = output_of(name, *(str(a).format(tmp=tmp_path) for a in arguments), limit=180, launcher=launcher)
    found = re.findall(pattern, output)
    assert found, output
    assert sum(map(int, found[-1])) == total


def test_demo_reports_and_draws(tmp_path):
    output = output_of("demo", "--quick", "--output", str(tmp_path), limit=180)
    splits = re.search(r"^split at the end +96/96/96 +(\d+)/(\d+)/(\d+)$", output, re.M)
    assert splits, output
    assert sum(map(int, splits.groups())) == 288
    trained = re.search(r"^samples trained on +(\d+) +(\d+)$", output, re.M)
    assert trained, output
    assert trained[1] == trained[2]
    for row in ("predicted step time", "measured step time", "speed-up, second half", "test accuracy"):
        assert row in output
    assert "first split, in proportion to measured speed" in output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
