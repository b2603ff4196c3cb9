"""The kernels, each against its reference; their share of the bandwidth of a copy is in `benchmarks/kernels.py`."""

import os
import subprocess
import sys

TESTS = "tests/kernels/interpreted.py"
FEW = "(a_step_is_the_definitions and int8) or (tried_before_training and sgd)"


def kernels(figures, device):
    """The tests that the interpreter runs elsewhere, natively; on CPUs a few of them, interpreted."""
    real = device.type == "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, *([] if real else ["-k", FEW])]
    env = {**os.environ, **({} if real else {"TRITON_INTERPRET": "1"})}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    figures["tests"] = ([line for line in done.stdout.splitlines() if line.strip()] or ["nothing"])[-1].strip("= ")
    figures.must(done.returncode == 0 and "skipped" not in figures["tests"], f"{TESTS}: {figures['tests']}")
