"""The kernels: each against its reference, what they compile, and their share of the bandwidth of a copy."""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu.common import ranks
from tests.gpu.outcome import NotHere

FILES = ("tests/kernels/interpreted.py",)
FEW = "(a_step_is_the_definitions and int8) or (tried_before_training and sgd)"
INTERPRETED = {"TRITON_INTERPRET": "1"}
LOOP = """
import torch, triton, triton.language as tl

def count(out_ptr, n):
    for i in range(0, n):
        tl.store(out_ptr + i, i)

triton.jit(count)[(1,)](torch.zeros(3, dtype=torch.int32), 3)
"""
SHARE = 0.8


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


def _tests(arguments, env):
    """Exit status and last line of some tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return done.returncode, ([line for line in done.stdout.splitlines() if line.strip()] or ["nothing"])[-1].strip("= ")


def _compiled(rank, device):
    """Kernels that are compiled when warming up, and by other densities and sizes after that."""
    from triton import knobs

    from lightning_hetero.compression.layout import Layout
    from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
    from lightning_hetero.compression.triton_gpu.warmup import warm
    from lightning_hetero.compression.wire_format import MessageFormat

    names, dtypes = [], (torch.float32, torch.bfloat16)
    knobs.runtime.jit_post_compile_hook = lambda **given: names.append(given["repr"])
    begin = time.perf_counter()
    warm(16, "bfloat16", 2, device, set(dtypes), hold=True)
    count, seconds = len(names), time.perf_counter() - begin
    for sizes, k in (((3_000_001, 700), 2000), ((3_000_001, 700), 31), ((64, 64, 5), 2)):
        layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], 16)
        form = MessageFormat(layout.num_blocks, k, 16, "bfloat16")
        encoder = TritonEncoder(layout, form, device, 2)
        rows = torch.zeros(2, form.num_bytes, dtype=torch.uint8, device=device)
        for dtype in dtypes:
            encoder.accumulate_bucket(layout.slots, torch.randn(sum(sizes), device=device).to(dtype), 0.5, hold=True)
        encoder.encode(rows[0], step=1)
        torch.cuda.synchronize()
    return {"kernels compiled": count, "compiled after that": names[count:], "warm-up seconds": seconds}


def kernels(figures, device):
    """The tests that the interpreter runs elsewhere, natively; on CPUs a few of them, interpreted."""
    if device.type == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            interpret(folder)
        status, figures["tests"] = _tests([*FILES, "-k", FEW], INTERPRETED)
        figures.must(status == 0, figures["tests"])
        return
    with ThreadPoolExecutor() as pool:
        for file, (status, text) in zip(FILES, pool.map(lambda file: _tests([file], {}), FILES), strict=True):
            figures[file] = text
            figures.must(status == 0 and "skipped" not in text, f"{file}: {text}")
    figures.add(ranks(_compiled, 1, device)[0])
    after = figures["compiled after that"]
    figures.must(figures["kernels compiled"] and not after, f"another density or layout compiles {after[:2]}")


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
        with tempfile.TemporaryDirectory() as folder:
            interpret(folder)
        command, env = [sys.executable, "-m", "tests.gpu.kernels"], {**os.environ, **INTERPRETED}
        figures.add(json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout))
    for name, value in list(figures.items()):
        figures.must(not name.endswith("merged") or value, f"{name}: {value}")
        if device.type == "cuda" and name.endswith("share of copy"):
            figures.must(value >= SHARE, f"{name} is {value:.2f}, wanted {SHARE}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_bandwidth(0, torch.device("cpu"), (2000,), 1)))
