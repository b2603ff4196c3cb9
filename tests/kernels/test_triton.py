"""Triton's kernels: what they compute, in its interpreter, and what a step on a GPU launches and waits for."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.compression.block_gradient import BlockMarks
from lightning_hetero.optim import SparseAdamW, SparseSGD

pytest.importorskip("triton")

from triton import knobs

from lightning_hetero.compression import Layout, MessageFormat
from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
from lightning_hetero.compression.triton_gpu.warmup import launch_all
from lightning_hetero.optim.sparse import warmup
from tests.gpu.builds import recording

ROOT = Path(__file__).parents[2]


def test_kernels_compute_what_the_definition_does():
    """In a process of its own: Triton has to be told before it is imported that it interprets."""
    files = [str(ROOT / "tests/kernels" / name) for name in ("interpreted.py", "device_decides.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


# steps on a GPU that is not here: a driver that launches nothing


@contextmanager
def launched():
    """Names of all kernels that are launched, one after the other."""
    with recording() as variants:
        names, note = [], knobs.runtime.jit_cache_hook

        def noted(**given):
            names.append(given["fn"].name.rpartition(".")[2])
            return note(**given)

        knobs.runtime.jit_cache_hook = noted
        yield names, variants


class DeviceSteps:
    """Steps of one rank as its exchange makes them: encode, receive, deliver, and a sparse optimizer's step."""

    def __init__(self, sizes, density, values, kind, **arguments):
        device = torch.device("cpu")
        self.parameters = [torch.nn.Parameter(torch.ones(n)) for n in sizes]
        self.flat, self.step = torch.randn(sum(sizes)), 0
        for p, part in zip(self.parameters, self.flat.split(sizes), strict=True):
            p.grad = part
        self.optimizer = kind(self.parameters, lr=0.01, **arguments)
        self.optimizer.step()  # dense: it makes the state
        self.layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], 16)
        self.values = values
        self.encoder = TritonEncoder(self.layout, self.form(density), device, 1)
        parts = self.encoder.touched.split([slot.padded // 16 for slot in self.layout.slots])
        self.given = {p: BlockMarks(part, p.grad) for p, part in zip(self.parameters, parts, strict=True)}
        self.optimizer.sparse.follow(lambda: self.given, 16)
        self.reform(density)

    def form(self, density):
        k = max(1, int(self.layout.num_blocks * density))
        return MessageFormat(self.layout.num_blocks, k, 16, self.values, self.layout.fingerprint())

    def reform(self, density):
        self.encoder.reform(self.form(density))
        self.rows = torch.zeros(1, self.encoder.form.num_bytes, dtype=torch.uint8)

    def __call__(self):
        enc, slots = self.encoder, self.layout.slots
        enc.accumulate_bucket(slots, self.flat, 0.5, hold=True)
        enc.encode(self.rows[0], step=self.step)
        enc.receive(self.rows, rank=0, step=self.step)
        enc.deliver_bucket(slots, self.flat, 0.5, scale=1.0, fill=0.0)
        enc.finish()
        self.optimizer.step()
        self.step += 1


KINDS = {
    "sparse_sgd": (SparseSGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "sparse_adamw": (SparseAdamW, {"weight_decay": 0.1}),
}


class Operations(TorchDispatchMode):
    """Names of torch's own operations, views left out, and what is done to counts that the host keeps."""

    def __init__(self, on_host):
        super().__init__()
        self.names, self.on_host = set(), on_host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        kept = any(arg is t for arg in args[:1] for t in self.on_host)
        if str(func).startswith("aten.") and not view and not kept:
            self.names.add(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("density", "kind"), [(0.05, "sparse_sgd"), (0.5, "sparse_adamw")])
def test_a_step_on_gpu_allocates_nothing_waits_for_nothing_and_launches_a_fixed_number(density, kind):
    """Between kernels there are only fills and copies in place: nothing new, nothing that the host would read."""
    counts = {}
    for sizes in ((6400, 3), (64, 3) * 50):
        with launched() as (names, _):
            step = DeviceSteps(sizes, density, "int8", KINDS[kind][0], **KINDS[kind][1])
            for _ in range(2):
                step()
            names.clear()
            kept = [state["step"] for state in step.optimizer.state.values() if "step" in state]
            with Operations(kept) as seen:
                step()
        assert seen.names <= {"zero_.default", "fill_.Scalar", "copy_.default"}
        assert set(names) >= {"accumulate", "hold", "pack", "merge", "take_back", "deliver", kind}
        counts[len(sizes)] = sorted(names)
    assert counts[2] == counts[100]
    assert len(counts[2]) <= 30


@pytest.mark.parametrize("kind", KINDS)
def test_no_density_compiles_a_kernel_that_was_not_compiled_before_training(kind):
    """Triton's own look-up."""
    with launched() as (_, variants):
        launch_all(16, "bfloat16", 1, torch.device("cpu"), {torch.float32}, hold=True)
        step = DeviceSteps((1_100_001, 700, 3, 16), 0.01, "bfloat16", KINDS[kind][0], **KINDS[kind][1])
        warmup.warm(step.optimizer.sparse, 16, torch.device("cpu"))
        tried = len(variants)
        for density in (0.01, 0.0003, 0.0123, 0.1, 0.73, 1.0):
            step.reform(density)
            step()
            assert [variant.label for variant in variants[tried:]] == [], density
    assert tried > 20


def test_where_kernels_fail_an_optimizer_says_why_and_what_takes_dense_steps_needs_none(caplog):
    """Triton has no driver here."""
    if torch.cuda.is_available():
        pytest.skip("kernels work here")
    one, frozen = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64), requires_grad=False)
    dense = SparseAdamW([{"params": [torch.nn.Parameter(torch.ones(64))], "amsgrad": True}, {"params": [frozen]}])
    assert warmup.kernels_work(dense.sparse, 16, torch.device("cpu"))
    assert not caplog.records
    assert not warmup.kernels_work(SparseAdamW([one]).sparse, 16, torch.device("cpu"))
    assert ["SparseAdamW" in record.getMessage() for record in caplog.records] == [True]
