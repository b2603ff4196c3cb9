"""Triton's kernels: what they compute, in its interpreter, and what they compile to, for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from tests.comm.compressors.block_steps import OPTIMIZERS, BlockSteps
from tests.helpers import run_ranks

pytest.importorskip("triton")

from lightning_hetero.compression.triton_gpu import encoder as triton_encoder
from lightning_hetero.compression.triton_gpu import message_reader, message_writer  # noqa: E402
from lightning_hetero.compression.triton_gpu import warmup as triton_warm  # noqa: E402
from lightning_hetero.optim.sparse import warmup as warming  # noqa: E402
from lightning_hetero.optim.sparse.triton_gpu import backend as triton_step
from tests.gpu.builds import recording  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


ROOMS = ("comm/compressors", "compression/triton_gpu", "optim/sparse")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Kernels in Triton's interpreter, a process for each room, all at once: it is asked for before they are imported.

    Returns:
        Function that waits for a room; it returns the exit status and what was printed.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folder, processes = tmp_path_factory.mktemp("printed"), {}
    for number, room in enumerate(ROOMS):
        file = str(ROOT / "tests" / room / "interpreted.py")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", file]
        with (folder / str(number)).open("w") as out:
            processes[room] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)

    def wait(room):
        status = processes[room].wait(280)
        return status, (folder / str(ROOMS.index(room))).read_text()

    yield wait
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("room", ROOMS)
def test_kernels_compute_what_the_reference_does(interpreted, room):
    status, printed = interpreted(room)
    assert status == 0, printed[-5000:]
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.gpu
def test_kernels_compute_what_the_reference_does_natively():
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    files = [str(ROOT / "tests" / room / "interpreted.py") for room in ("compression/triton_gpu", "optim/sparse")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_the_benchmark_is_ready(tmp_path):
    """In the interpreter, small; in full it asks for a GPU."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--quick", "--out", str(tmp_path / "k.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    found = {row["candidate"]: row for row in rows}
    assert {"copy", "ours, K1 to K3 with the header", "torch.topk of blocks", "fp16 cast", "SparseAdamW"} <= set(found)
    assert all(row["us"] > 0 for row in rows)
    assert found["ours, K1 to K3 with the header"]["share of copy"] > 0
    if torch.cuda.device_count() == 0:
        command.remove("--quick")
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode != 0
        assert "needs a GPU, or --quick" in refused.stderr


class Queue:
    """Stands for a module of kernels, and counts what is queued."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        return _Launch(self, name)


class _Launch:
    def __init__(self, queue, name):
        self.queue, self.name = queue, name

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.queue.names.append(self.name)


class Operations(TorchDispatchMode):
    """Names of torch's own operations, views left out, and what is done to tensors that the host keeps."""

    def __init__(self, on_host):
        super().__init__()
        self.names, self.on_host = set(), on_host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        kept = any(arg is t for arg in args[:1] for t in self.on_host)
        if str(func).startswith("aten.") and not view and not kept:
            self.names.add(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def on_this_host(world_size=1):
    """Let exchanges have the encoder of a GPU."""
    BlockTopKAverager._encoder = lambda exchange, parameters, hold_unused: triton_encoder.TritonEncoder(
        exchange.model.layout, exchange._form(exchange.density), torch.device("cpu"), world_size
    )


def _queued(rank, density, optimizer, sizes):
    """Kernels and operations of a step on a GPU, whose kernels do nothing here."""
    queue = Queue()
    for module in (triton_encoder, message_writer, message_reader, triton_step):
        for name in {"encoding", "headers", "receiving", "applying", "kernels"} & set(vars(module)):
            setattr(module, name, queue)
    queue.EXPONENT_BINS = 256
    on_this_host()
    dist.init_process_group("gloo")
    step = BlockSteps(sizes, density, "int8", optimizer, torch.device("cpu"))
    for _ in range(2):
        step()
    queue.names.clear()
    counts = [state["step"] for state in step.optimizer.state.values() if "step" in state]  # torch's AdamW keeps them
    with Operations(counts) as seen:
        step()
    return seen.names, queue.names


@pytest.mark.parametrize(("density", "optimizer"), [(0.05, "SparseSGD"), (0.5, "SparseAdamW")])
def test_a_step_on_gpu_allocates_nothing_and_waits_for_nothing(density, optimizer):
    """Between two kernels there are only fills and copies in place: nothing new, nothing that the host would read."""
    ((operations, queued),) = run_ranks(_queued, 1, density, optimizer, (700, 3))
    assert operations <= {"zero_.default", "fill_.Scalar", "copy_.default"}
    assert set(queued) >= {"accumulate", "hold", "pack", "seal", "check", "merge", "take_back", "deliver"}
    assert {"sparse_sgd", "sparse_adamw"} & set(queued) == {{"SparseSGD": "sparse_sgd"}.get(optimizer, "sparse_adamw")}


def test_how_many_kernels_a_step_launches_does_not_depend_on_how_many_parameters_there_are():
    launches = {}
    for sizes in ((6400, 3), (64, 3) * 50):
        ((_, queued),) = run_ranks(_queued, 1, 0.05, "SparseSGD", sizes)
        launches[len(sizes)] = queued
    assert launches[2] == launches[100]
    assert len(launches[2]) <= 30


def _compiled(rank, optimizer):
    """Variants that steps launch at one density after the other, and of these the ones that nobody has tried before."""
    dist.init_process_group("gloo")
    on_this_host()
    sizes, later = (1_100_001, 700, 3, 16), {}
    with recording() as found:
        triton_warm.launch_all(16, "bfloat16", 1, torch.device("cpu"), {torch.float32}, hold=True)
        step = BlockSteps(sizes, 0.01, "bfloat16", optimizer, torch.device("cpu"))
        warming.warm(step.optimizer.sparse, 16, torch.device("cpu"))
        tried = len(found)
        for density in (0.01, 0.0003, 0.0123, 0.1, 0.73, 1.0):
            step.exchange.set_density(density)
            step()
            later[density] = [variant.label for variant in found[tried:]]
    return tried, later


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_density_compiles_a_kernel_that_was_not_compiled_before_training(optimizer):
    """Triton's own look-up, with a driver that launches nothing."""
    ((tried, later),) = run_ranks(_compiled, 1, optimizer)
    assert tried > 20
    assert later == dict.fromkeys(later, [])
