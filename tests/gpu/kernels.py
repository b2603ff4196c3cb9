"""The kernels: each against its reference, and their share of the bandwidth of a copy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu.common import ranks

TESTS = "tests/kernels/interpreted.py"
FEW = "(a_step_is_the_definitions and int8) or (tried_before_training and sgd)"
INTERPRETED = {"TRITON_INTERPRET": "1"}
SHARE = 0.8


def kernels(figures, device):
    """The tests that the interpreter runs elsewhere, natively; on CPUs a few of them, interpreted."""
    real = device.type == "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, *([] if real else ["-k", FEW])]
    env = {**os.environ, **({} if real else INTERPRETED)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    figures["tests"] = ([line for line in done.stdout.splitlines() if line.strip()] or ["nothing"])[-1].strip("= ")
    figures.must(done.returncode == 0 and "skipped" not in figures["tests"], f"{TESTS}: {figures['tests']}")


def _bandwidth(rank, device, sizes, rounds):
    """For each size: milliseconds, and the share of a copy's bandwidth at which bytes move that have to."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from kernels import Model, compress_candidates, timed

    found = {}
    for n in sizes:
        model = Model(n, 0.01, torch.float32, "bfloat16", 25_000_000)
        candidates = compress_candidates(model)
        parts = {"encode": ("ours, K1 to K3 with the header", 12.75), "receive": ("ours, after the exchange", 8.0)}
        seconds = timed({name: candidates[name] for name in ("copy", *(name for name, _ in parts.values()))}, rounds)
        bandwidth = 8 * model.layout.numel / seconds["copy"]
        for part, (name, size) in parts.items():
            found[f"{n:.3g} elements, {part}: ms"] = 1e3 * seconds[name]
            found[f"{n:.3g} elements, {part}: share of copy"] = model.layout.numel * size / seconds[name] / bandwidth
        outcome = model.encoder.outcome()
        found[f"{n:.3g} elements: merged"] = outcome is not None and not outcome.dropped
        del model, candidates
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def bandwidth(figures, device):
    """At two sizes; on CPUs the interpreter runs them, in a process that has not imported Triton before."""
    if device.type == "cuda":
        figures.add(ranks(_bandwidth, 1, device, (88_000_000, 1_000_000_000), 10)[0])
    else:
        command, env = [sys.executable, "-m", "tests.gpu.kernels"], {**os.environ, **INTERPRETED}
        figures.add(json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout))
    for name, value in list(figures.items()):
        figures.must(not name.endswith("merged") or value, f"{name}: {value}")
        if device.type == "cuda" and name.endswith("share of copy"):
            figures.must(value >= SHARE, f"{name} is {value:.2f}, wanted {SHARE}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_bandwidth(0, torch.device("cpu"), (2000,), 1)))
