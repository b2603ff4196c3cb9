"""A check that goes wrong is said, and ends the run with an error: nobody reads the logs of what seems to pass.

This file is also the program that is tested: that of `make gpu`, with other checks.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.main import CHECKS, main  # noqa: E402
from tests.gpu.outcome import Check  # noqa: E402


def passes(figures, device):
    figures.add({"half": 0.5})


def misses(figures, device):
    figures.must(False, "two is not three")
    figures["after"] = True


def raises(figures, device):
    figures["known"] = figures.known["passes"]["half"]
    raise ValueError("an error\nof two lines")


def dies(figures, device):
    os._exit(3)


def hangs(figures, device):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    figures["child"] = child.pid
    time.sleep(600)


EXPECTED = {
    "passes": ("passed", ""),
    "misses": ("failed", "two is not three"),
    "raises": ("failed", "ValueError: an error"),
    "dies": ("died", "exit status 3"),
    "hangs": ("timed out", "not done within 3 s"),
    "needs": ("skipped", "no-such-package"),
    "long": ("skipped", "takes 10000 s"),
}


def test_each_check_has_its_outcome_whatever_the_others_do(tmp_path):
    command = [sys.executable, __file__, "--out", str(tmp_path), "--budget", "600"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads((tmp_path / "gpu.json").read_text())["checks"]}
    assert {name: check["outcome"] for name, check in found.items()} == {
        name: one for name, (one, _) in EXPECTED.items()
    }
    for name, (_, why) in EXPECTED.items():
        assert why in found[name]["why"]
        assert why in next(line for line in done.stdout.splitlines() if f" {name} " in line)
    figures = [found[name]["figures"] for name in ("passes", "misses", "raises")]
    assert figures == [{"half": 0.5}, {"after": True}, {"known": 0.5}]
    state = Path(f"/proc/{found['hangs']['figures']['child']}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "what it started has ended"


def test_every_check_exists_and_fits_its_limit():
    for check in CHECKS:
        assert callable(getattr(importlib.import_module(f"tests.gpu.{check.module}"), check.name))
        assert check.takes < check.limit


if __name__ == "__main__":
    checks = [
        Check(
            name,
            "test_main",
            "",
            10_000 if name == "long" else 1,
            3 if name == "hangs" else 60,
            ("no-such-package",) if name == "needs" else (),
        )
        for name in EXPECTED
    ]
    sys.exit(main(checks))
