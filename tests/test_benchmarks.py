"""Benchmarks run by hand. Here, they import, and what is committed says how it was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow("imports all benchmarks in two interpreters")
def test_every_benchmark_finds_what_it_imports():
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    for folder in (FOLDER, FOLDER / "papers"):
        names = sorted(path.stem for path in folder.glob("*.py"))
        assert names
        done = subprocess.run(
            [sys.executable, "-c", code, *names],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]


# what is committed


def test_results_are_small_and_say_on_what_they_were_measured():
    papers = ("cannikin", "dynamic_batching", "adaptive_sgd", "stellatrain")
    paths = [path for path in (FOLDER / "results").glob("*.json") if path.stem.startswith(papers)]
    assert len(paths) > len(papers)
    for path in paths:
        assert path.stat().st_size < 100_000
        assert {"title", "hardware", "date", "rows"} <= set(json.loads(path.read_text()))
