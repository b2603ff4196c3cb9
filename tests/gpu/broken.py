"""Checks that do not all go well, for the test of how checks are run; the same program with them in place of ours."""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.main import main  # noqa: E402
from tests.gpu.outcome import Check, NotHere  # noqa: E402


def passes(figures, device):
    figures["two"] = 2
    figures.add({"half": 0.5, "list": [1, 2]})


def misses(figures, device):
    figures["three"] = 3
    figures.must(False, "two is not three")
    figures.must(False, "nor is it four")
    figures["after"] = True


def raises(figures, device):
    figures["before"] = True
    raise ValueError("an error\nof two lines")


def dies(figures, device):
    figures["before"] = True
    os._exit(3)


def absent(figures, device):
    raise NotHere("it rains")


def hangs(figures, device):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    figures["child"] = child.pid
    time.sleep(600)


def knows(figures, device):
    figures["known"] = figures.known["passes"]["two"]


CHECKS = (
    Check("passes", "broken", "shows <nothing>", 1, 60),
    Check("misses", "broken", "", 2, 60),
    Check("raises", "broken", "", 3, 60),
    Check("dies", "broken", "", 4, 60),
    Check("hangs", "broken", "", 10_000, 3),
    Check("absent", "broken", "", 1, 60),
    Check("unknown", "broken", "", 1, 60, ("torch", "no-such-package")),
    Check("knows", "broken", "", 1, 60),
)

if __name__ == "__main__":
    sys.exit(main(CHECKS))
