"""Benchmarks take long and run by hand: that what they import is there is seen here."""

import doctest
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.warm.interpreter import warmed

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_every_benchmark_finds_what_it_imports():
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert "compression" in names
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        warmed(sys.executable, "-c", code, *names),
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_follows_a_link_and_what_goes_back_is_told(monkeypatch):
    spec = importlib.util.spec_from_file_location("_following", FOLDER / "_following.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "_following", module)  # another test may have imported it
    spec.loader.exec_module(module)
    found = doctest.testmod(module)
    assert found.failed == 0 < found.attempted
