"""Triton's kernels: what they compute, in its interpreter, and what they compile to, for GPUs that are not here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.comm.block_exchange import BlockExchange
from tests.comm.block_steps import BlockSteps
from tests.helpers import run_ranks

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lightning_hetero.compression import kernels, receiving, triton_encoder  # noqa: E402
from lightning_hetero.optim import kernels as steps  # noqa: E402
from lightning_hetero.optim import triton_step  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NVIDIA = [80, 90, 100]
AMD = GPUTarget("hip", "gfx942", 64)

F32, I32 = "*fp32", "*i32"
BLOCKS = {"BLOCK": 16, "TILE": triton_encoder.TILE}


def accumulate(gradient):
    signature = {"g_ptr": gradient, "r_ptr": F32, "score_ptr": F32, "hist_ptr": I32, "used_ptr": "*u8"}
    sizes = {"weight": "fp32", "numel": "i32", "num_blocks": "i32"}
    return kernels.accumulate, {**signature, **sizes}, {**BLOCKS, "ITERS": 8, "HOLD": False}


def pack(values):
    int8 = values == "*i8"
    signature = {"chosen_ptr": I32, "r_ptr": F32, "value_ptr": values, "scale_ptr": "*bf16", "index_ptr": "*i16"}
    return kernels.pack, {**signature, "counts_ptr": I32, "k": "i32"}, {**BLOCKS, "INT8": int8, "SEGMENTS": True}


def sparse(function, parameter, buffers, scalars, **flags):
    """A sparse optimizer: parameter and gradient of one type, state in float32."""
    signature = {"p_ptr": parameter, "g_ptr": parameter, **dict.fromkeys(buffers, F32), "touched_ptr": "*u8"}
    signature |= {"settled_ptr": "*i64", "table_ptr": F32, "step": "i32", **dict.fromkeys(scalars, "fp32")}
    return (
        function,
        {**signature, "numel": "i32", "num_blocks": "i32"},
        {"BLOCK": 16, "TILE": triton_step.TILE, **flags},
    )


def sgd(parameter):
    flags = {"MOMENTUM": True, "NESTEROV": True, "AHEAD": True, "OWES": True}
    return sparse(steps.sparse_sgd, parameter, ["m_ptr"], ["lr", "decay", "momentum", "rest"], **flags)


def adamw(parameter):
    scalars = ["shrink", "one_minus_beta1", "beta2", "one_minus_beta2", "root", "size", "eps", "small"]
    return sparse(steps.sparse_adamw, parameter, ["m_ptr", "v_ptr"], scalars, AHEAD=True)


def ints(names):
    return dict.fromkeys(names.split(), "i32")


SCORES = {"score_ptr": F32, "plan_ptr": I32, "num_blocks": "i32"}
TILES = {"score_ptr": F32, "plan_ptr": I32, "above_ptr": I32, "edge_ptr": I32}
SUMS = {"sums_ptr": "*i64"}
NUMBERS = {"status_ptr": I32, "numbers_ptr": I32}
VALUES = {"value_ptr": "*bf16", "scale_ptr": "*bf16"}
PLAIN = {**BLOCKS, "INT8": False}
KERNELS = {
    "accumulate fp32": accumulate("*fp32"),
    "accumulate bf16": accumulate("*bf16"),
    "accumulate fp16": accumulate("*fp16"),
    "pick": (kernels.pick, {"hist_ptr": I32, "plan_ptr": I32, "k": "i32"}, {"FINE": True}),
    "refine": (kernels.refine, {**SCORES, "hist_ptr": I32}, {"TILE": 1024, "ITERS": 8}),
    "count": (kernels.count, {**TILES, "num_blocks": "i32"}, {"TILE": 1024}),
    "place": (kernels.place, {**TILES, "chosen_ptr": I32, "num_blocks": "i32", "k": "i32"}, {"TILE": 1024}),
    "pack fp32": pack("*fp32"),
    "pack bf16": pack("*bf16"),
    "pack int8": pack("*i8"),
    "word_sums": (
        receiving.word_sums,
        {"words_ptr": I32, **SUMS, **ints("words stride")},
        {"TILE": 1024, "ITERS": 8},
    ),
    "seal": (
        receiving.seal,
        {"header_ptr": "*i64", **SUMS, "plan_ptr": I32, "above_ptr": I32, "edge_ptr": I32}
        | {**ints("tiles k rank bucket step"), "fingerprint": "i64"},
        {},
    ),
    "prefix": (receiving.prefix, {"counts_ptr": I32, "ends_ptr": I32, **ints("length stride")}, {"TILE": 1024}),
    "inspect": (
        receiving.inspect,
        {"header_ptr": "*i64", **SUMS, "counts_ptr": I32, "ends_ptr": I32, "status_ptr": I32}
        | {**ints("stride counts_stride length k world bucket step"), "fingerprint": "i64"},
        {"TILE": 1024},
    ),
    "expand": (
        receiving.expand,
        {"places_ptr": "*i16", "ends_ptr": I32, **NUMBERS, **ints("stride segments k world")},
        {"STEPS": 7, "TILE": 128},
    ),
    "tally": (receiving.tally, {"words_ptr": I32, "counts_ptr": I32, **ints("stride bits")}, {"TILE": 1024}),
    "spread": (
        receiving.spread,
        {"words_ptr": I32, "ends_ptr": I32, **NUMBERS, **ints("stride bits k")},
        {"TILE": 1024},
    ),
    "check": (
        receiving.check,
        {**NUMBERS, **VALUES, **ints("value_stride scale_stride num_blocks k world")},
        PLAIN,
    ),
    "decide": (receiving.decide, {"status_ptr": I32, "world": "i32"}, {"WIDTH": 8}),
    "merge": (
        receiving.merge,
        {"numbers_ptr": I32, **VALUES, "merged_ptr": F32, "touched_ptr": "*u8", "verdict_ptr": I32}
        | ints("peer value_stride scale_stride k"),
        PLAIN,
    ),
    "take_back": (
        receiving.take_back,
        {"chosen_ptr": I32, **VALUES, "r_ptr": F32, "verdict_ptr": I32, "k": "i32"},
        PLAIN,
    ),
    "deliver": (
        receiving.deliver,
        {"g_ptr": "*bf16", "r_ptr": F32, "merged_ptr": F32, "verdict_ptr": I32}
        | {**dict.fromkeys(("weight", "scale", "fill"), "fp32"), "numel": "i32"},
        {"TILE": 1024},
    ),
    "wipe": (receiving.wipe, {"numbers_ptr": I32, "merged_ptr": F32, "verdict_ptr": I32, "total": "i32"}, BLOCKS),
    "sgd fp32": sgd("*fp32"),
    "sgd bf16": sgd("*bf16"),
    "adamw fp32": adamw("*fp32"),
    "adamw bf16": adamw("*bf16"),
    "adamw fp16": adamw("*fp16"),
}
WIDE = {name for name in KERNELS if name.startswith(("accumulate", "pack", "sgd", "adamw"))}
WIDE |= {"deliver", "merge", "take_back"}
SHORT_ON_AMD = {name for name in KERNELS if name.startswith(("sgd", "adamw"))}
"""Twice as many threads as on NVIDIA share a tile: they load 64 bits each."""

REGISTERS = {("accumulate fp32", 80): 72}
"""Builds that take more than 64."""


def test_kernels_compute_what_the_reference_does():
    """In a process of its own: Triton asks for its interpreter before the kernels are imported."""
    files = [str(ROOT / "tests" / room / "interpreted.py") for room in ("comm", "compression", "optim")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.gpu
def test_kernels_compute_what_the_reference_does_natively():
    if torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    files = [str(ROOT / "tests" / room / "interpreted.py") for room in ("compression", "optim")]
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


def compiled(name, target):
    function, signature, constants = KERNELS[name]
    names = function.arg_names
    aligned = [
        n
        for n in names
        if n in signature and (signature[n].startswith("*") or n in ("numel", "num_blocks", "k", "value_stride"))
    ]
    source = ASTSource(
        fn=function,
        signature={n: signature.get(n, "constexpr") for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = triton_encoder.EIGHT_WARPS if name.startswith(("place", "pack")) else triton_encoder.OPTIONS
    return triton.compile(source, target=target, options=options)


def tool(name):
    found = sorted(Path(triton.__file__).parent.glob(f"backends/nvidia/bin/{name}"))
    return str(found[0]) if found else pytest.skip(f"this Triton carries no {name}")


@pytest.mark.parametrize("capability", NVIDIA)
@pytest.mark.parametrize("name", KERNELS)
def test_nvidia_builds_do_not_spill_and_load_128_bits(name, capability, tmp_path):
    """Widths are those of the PTX: its assembler makes one load of each vector that is aligned."""
    built, cubin = compiled(name, GPUTarget("cuda", capability, 32)), tmp_path / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(cubin)], capture_output=True, text=True, check=True)
    registers = int(re.search(r"REG:(\d+)", usage.stdout)[1])
    spilled = int(re.search(r"STACK:(\d+)", usage.stdout)[1]) + int(re.search(r"LOCAL:(\d+)", usage.stdout)[1])
    assert spilled == 0
    assert registers <= REGISTERS.get((name, capability), 64)
    assert name not in WIDE or re.search(r"ld\.global\S*\.v4\.b32", built.asm["ptx"])


@pytest.mark.parametrize("name", KERNELS)
def test_amd_builds_do_not_spill_and_load_128_bits(name):
    code = compiled(name, AMD).asm["amdgcn"]
    assert int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]) == 0
    assert int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]) <= 128
    assert name not in WIDE - SHORT_ON_AMD or re.search(r"(global|buffer)_load_dwordx4", code)


class Queue:
    """Stands for a module of kernels, and counts what is queued."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        return {} if name == "FAULTS" else _Launch(self, name)


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


def _queued(rank, density, optimizer):
    """Kernels and operations of a step on a GPU, whose kernels do nothing here."""
    queue = Queue()
    triton_encoder.kernels = triton_encoder.receiving = triton_step.kernels = queue
    queue.EXPONENTS = 256
    BlockExchange._encoder = lambda exchange, parameters: triton_encoder.TritonEncoder(
        exchange.layout, exchange._form(density), torch.device("cpu"), 1
    )
    dist.init_process_group("gloo")
    step = BlockSteps((700, 3), density, "int8", optimizer, torch.device("cpu"))
    for _ in range(2):
        step()
    queue.names.clear()
    counts = [state["step"] for state in step.optimizer.state.values() if "step" in state]  # torch's AdamW keeps them
    with Operations(counts) as seen:
        step()
    return seen.names, set(queue.names)


@pytest.mark.parametrize(("density", "optimizer"), [(0.05, "SparseSGD"), (0.5, "SparseAdamW")])
def test_a_step_on_gpu_allocates_nothing_and_waits_for_nothing(density, optimizer):
    """Between two kernels there are only fills and copies in place: nothing new, nothing that the host would read."""
    ((operations, queued),) = run_ranks(_queued, 1, density, optimizer)
    assert operations <= {"zero_.default", "fill_.Scalar", "copy_.default", "any.all_out"}
    assert queued >= {"accumulate", "pack", "seal", "check", "merge", "take_back", "deliver"}
    assert {"sparse_sgd", "sparse_adamw"} & queued == {{"SparseSGD": "sparse_sgd"}.get(optimizer, "sparse_adamw")}
