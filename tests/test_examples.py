"""Every example runs as a user would run it, and says what it is there to show."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# Name of the example and the split that it ends with: a pattern, and the total batch.
SHOWN = {
    "basic": (r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)", 256),
    "explicit_split": (r"split (170)/(86) from epoch 0 step 0: ", 256),
    "thin_link": (r"split (128)/(128) from epoch 0 step 0: ", 256),
    "pid": (r"split (\d+)/(\d+) from epoch \d+ step \d+: compute times", 256),
    "token_weights": (r"split (\d+)/(\d+) from epoch \d+ step \d+: (?:first split|optimum|speed)", 128),
    "custom_planner": (r"split (\d+)/(\d+) from epoch 0 step \d+: by samples per second, once", 256),
}


def output_of(name, *arguments, limit):
    """What an example prints; it must succeed within ``limit`` seconds, and all its processes are ended if not."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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
def test_example(name):
    pattern, total = SHOWN[name]
    output = output_of(name, limit=120)
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
