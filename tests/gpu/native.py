"""The tests of kernels that the interpreter runs elsewhere, natively: compression and optimizers side by side."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.common import pytest_passes
from tests.gpu.outcome import NotHere, require

FILES = ("tests/compression/triton_gpu/interpreted.py", "tests/optim/sparse/interpreted.py")
INTERPRETED = {"TRITON_INTERPRET": "1"}


def gpu():
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda file: pytest_passes([file, "--timeout=140"]), FILES))
    figures = dict(zip(FILES, (each["tests"] for each in found), strict=True))
    require(not any("skipped" in text for text in figures.values()), "tests were skipped", figures)
    return figures


LOOP = """
import torch, triton, triton.language as tl

def count(out_ptr, n):
    for i in range(0, n):
        tl.store(out_ptr + i, i)

triton.jit(count)[(1,)](torch.zeros(3, dtype=torch.int32), 3)
"""


def interpret(folder):
    """Run a loop in Triton's interpreter: that of 3.6 has no loops with numpy 2.4 or newer.

    Raises:
        NotHere: with what it says.
    """
    script = Path(folder) / "loop.py"
    script.write_text(LOOP)
    done = subprocess.run([sys.executable, script], env={**os.environ, **INTERPRETED}, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NotHere(f"Triton's interpreter runs no loop: {said[-1]}")


def stand_in():
    """One test of each file through the interpreter; the tests run all of them so."""
    with tempfile.TemporaryDirectory() as folder:
        interpret(folder)
    kernels = pytest_passes([FILES[0], "-k", "a_step_is_that_of_the_reference and int8"], INTERPRETED)
    steps = pytest_passes([FILES[1], "-k", "without_elements"], INTERPRETED)
    return {FILES[0]: kernels["tests"], FILES[1]: steps["tests"]}
