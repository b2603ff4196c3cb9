"""Compile the kernels for GPUs that are not here, and say what they take: registers, spills, widths of loads.

What is compiled is what a job would launch: a driver that launches nothing notes each kernel with the types, constants
and alignments of its arguments, and every variant is then built for each target. ``python tests/gpu/builds.py`` prints
a table, over as many processes as there are cores; tests take single builds.
"""

import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from lightning_hetero.compression.block_gradient import BlockMarks
from lightning_hetero.compression.triton_gpu.warmup import launch_all
from lightning_hetero.optim import SparseAdamW, SparseSGD

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
VALUES = ("float32", "bfloat16", "int8")
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
OPTIMIZERS = (
    (SparseSGD, {"lr": 0.1}),
    (SparseSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (SparseSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "pay": "later"}),
    (SparseAdamW, {"lr": 0.1}),
    (SparseAdamW, {"lr": 0.1, "pay": "later"}),
)


class NoDriver:
    """Stands for the driver of a GPU as far as :class:`triton.JITFunction` asks for it before it compiles."""

    def get_current_target(self):
        return TARGETS["sm_90"]

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


@dataclass(frozen=True)
class Variant:
    """A kernel with what the compiler is told of its arguments.

    Args:
        name: of the kernel.
        function: Triton's.
        signature: type of each argument.
        constants: values of those that are fixed, by position.
        aligned: positions of pointers that are multiples of 16 bytes.
        num_warps: of a program.
    """

    name: str
    function: object
    signature: tuple
    constants: tuple
    aligned: tuple
    num_warps: int

    @property
    def label(self):
        """Name, element types of the first pointers to be told apart by, and constants that are flags or units."""
        names = self.function.arg_names
        types = [kind[1:] for argument, kind in self.signature if argument in ("g_ptr", "value_ptr", "m_ptr")]
        fixed = {names[at[0]]: value for at, value in self.constants if names[at[0]] not in ("BLOCK", "TILE", "ITERS")}
        flags = [f"{key}={value if isinstance(value, tl.dtype) else int(value)}" for key, value in fixed.items()]
        return " ".join([self.name, *types, *flags])

    def compiled(self, target):
        source = ASTSource(
            fn=self.function,
            signature=dict(self.signature),
            constexprs=dict(self.constants),
            attrs={at: [["tt.divisibility", 16]] for at in self.aligned},
        )
        return triton.compile(source, target=target, options={"num_warps": self.num_warps, "enable_fp_fusion": False})


@contextmanager
def recording():
    """Note every variant that is launched and not known yet, in place of compiling it; yields the list."""
    seen, found = set(), []

    def note(*, key, fn, compile, **_):
        if (fn.name, str(key)) in seen:
            return True
        seen.add((fn.name, str(key)))
        aligned = [at for at, attributes in compile["configs"][0].items() if ["tt.divisibility", 16] in attributes]
        signature, constants = tuple(compile["signature"].items()), tuple(compile["constants"].items())
        warps = compile["num_warps"]
        found.append(Variant(fn.name, fn.jit_function, signature, constants, tuple(aligned), warps))
        return True  # do not compile it

    hook, active = knobs.runtime.jit_cache_hook, driver._active
    knobs.runtime.jit_cache_hook = note
    driver.set_active(NoDriver())
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = hook
        driver._active = active


@cache
def variants():
    """All variants of jobs with any type of values and gradients, by label."""
    with recording() as found:
        for values in VALUES:
            for hold in (False, True):
                launch_all(16, values, 4, torch.device("cpu"), set(GRADIENTS), hold=hold)
        for dtype in GRADIENTS:
            for kind, settings in OPTIMIZERS:
                step_sparsely(kind, settings, dtype)
    return {variant.label: variant for variant in sorted(found, key=lambda variant: variant.label)}


def step_sparsely(kind, settings, dtype, sizes=(1024,)):
    """A dense step, which makes the optimizer's state, and a sparse one by marks."""
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]
    optimizer, given = kind(parameters, **settings), {}
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.sparse.follow(lambda: given, 16)
    given.update({p: BlockMarks(torch.ones(-(-p.numel() // 16), dtype=torch.bool), p.grad) for p in parameters})
    optimizer.step()


@cache
def tool(name):
    """Where NVIDIA's tool of this name is, that Triton carries, or ``None``."""
    found = sorted(Path(triton.__file__).parent.glob(f"backends/nvidia/bin/{name}"))
    return str(found[0]) if found else None


@dataclass(frozen=True)
class Usage:
    """What a build takes: registers and bytes of spills, ``None`` if no tool tells; whether it loads 128 bits."""

    registers: int | None
    spilled: int | None
    wide: bool


def usage(built):
    """What a build takes."""
    if "amdgcn" in built.asm:
        code = built.asm["amdgcn"]
        count, spilled = (int(re.search(rf"\.vgpr_{what}:\s+(\d+)", code)[1]) for what in ("count", "spill_count"))
        return Usage(count, spilled, bool(re.search(r"(global|buffer)_load_dwordx4", code)))
    wide = bool(re.search(r"ld\.global\S*\.v4\.b32", built.asm["ptx"]))
    if tool("cuobjdump") is None:
        return Usage(None, None, wide)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        command = [tool("cuobjdump"), "-res-usage", cubin.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = sum(int(re.search(rf"{where}:(\d+)", told)[1]) for where in ("STACK", "LOCAL"))
    return Usage(int(re.search(r"REG:(\d+)", told)[1]), spilled, wide)


def build(label, target):
    """Compile one variant for one target: what it takes, or the last line of why not."""
    try:
        return usage(variants()[label].compiled(TARGETS[target]))
    except Exception as error:  # whatever the compiler says is the result
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def main():
    begin, failed = time.perf_counter(), 0
    jobs = [(label, target) for target in TARGETS for label in variants()]
    with ProcessPoolExecutor() as pool:
        for job, found in zip(jobs, pool.map(build, *zip(*jobs, strict=True)), strict=True):
            label, target = job
            good = isinstance(found, Usage) and not found.spilled
            failed += not good
            sys.stdout.write(f"{target:7} {label:48} {found}\n")
    sys.stdout.write(f"{len(jobs)} builds, {failed} failed or spill, {time.perf_counter() - begin:.0f} s\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
