"""All kernels compile, for the GPUs that this project is for; once warm, nothing compiles any more."""

import os
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.gpu.common import GPU
from tests.gpu.outcome import require

SPILLED = 32
"""Bytes of registers that a kernel may spill; Triton 3.6 spills 8 of one that has no aligned addresses."""


def build_all(targets, labels=None):
    """Build kernels for targets, with and without aligned addresses, in as many processes as there are cores."""
    from tests.gpu import builds

    begin = time.perf_counter()
    jobs = [
        (label, target, even) for target in targets for even in (True, False) for label in labels or builds.variants()
    ]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(builds.build, *zip(*jobs, strict=True)))
    broken = [
        f"{target} {label}: {use}" for (label, target, _), use in zip(jobs, found, strict=True) if isinstance(use, str)
    ]
    uses = [use for use in found if not isinstance(use, str)]
    figures = {
        "targets": " ".join(targets),
        "builds": len(jobs),
        "most registers": max((use.registers or 0 for use in uses), default=0),
        "most spilled bytes": max((use.spilled or 0 for use in uses), default=0),
        "build seconds": time.perf_counter() - begin,
    }
    require(not broken, f"{len(broken)} builds failed, the first: {broken[:1]}", {**figures, "broken": broken})
    require(figures["most spilled bytes"] <= SPILLED, "a kernel spills its registers", figures)
    return figures


def gpu():
    """Build for other targets, then warm up here and count what further settings compile."""
    from triton import knobs

    from lightning_hetero.compression.triton_gpu.warmup import warm
    from tests.gpu import builds

    figures = build_all(["sm_80", "sm_100", "gfx942"])
    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["repr"])
    begin = time.perf_counter()
    dtypes = {torch.float32, torch.bfloat16}
    warm(16, "bfloat16", 2, GPU, dtypes, hold=True)
    figures |= {"kernels compiled when warming up": len(compiled), "warm-up seconds": time.perf_counter() - begin}
    compiled.clear()
    for sizes, k in (((3_000_001, 700), 2000), ((3_000_001, 700), 31), ((64, 64, 5), 2)):
        exchange(builds, sizes, k, dtypes)
    figures["kernels compiled after that"] = len(compiled)
    require(not compiled, f"a change of density or layout compiles {compiled[:2]}", figures)
    require(figures["kernels compiled when warming up"] > 0, "nothing was compiled when warming up", figures)
    return figures


def exchange(builds, sizes, k, dtypes):
    """One step of the kernels at another size and number of blocks."""
    from lightning_hetero.compression.layout import Layout
    from lightning_hetero.compression.triton_gpu.encoder import TritonEncoder
    from lightning_hetero.compression.wire_format import MessageFormat

    layout = Layout.of([(f"p{i}", n) for i, n in enumerate(sizes)], 16)
    form = MessageFormat(layout.num_blocks, k, 16, "bfloat16")
    encoder = TritonEncoder(layout, form, GPU, 2)
    rows = torch.zeros(2, form.num_bytes, dtype=torch.uint8, device=GPU)
    for dtype in dtypes:
        bucket = torch.randn(sum(sizes), device=GPU).to(dtype)
        encoder.accumulate_bucket(layout.slots, bucket, 0.5, hold=True)
    encoder.encode(rows[0], step=1)
    torch.cuda.synchronize()


def stand_in():
    """Some kernels for every target; the tests build all for one, and all of them is a minute's work here."""
    from tests.gpu import builds

    wanted = ("accumulate", "pack", "sparse_sgd")
    first = {variant.name.rpartition(".")[2]: label for label, variant in builds.variants().items()}
    return build_all(["sm_80", "sm_90", "sm_100", "gfx942"], [first[name] for name in wanted])
