"""The machine and the software: versions, a compiler for Triton, bandwidth of a copy, speed of a product."""

import shutil
import sysconfig
from pathlib import Path

import torch

from tests.gpu.common import GPU

ELEMENTS = 2**28


def software():
    """What the other checks rely on."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return {"torch": torch.__version__, "C compiler": compiler or "none", "Python.h": header.exists()}


def seconds_of(function, rounds=10):
    """Median seconds of a call on the GPU, after three that do not count."""
    found = []
    for turn in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            found.append(begin.elapsed_time(end) * 1e-3)
    return sorted(found)[rounds // 2]


def gpu():
    properties = torch.cuda.get_device_properties(GPU)
    both = [torch.empty(ELEMENTS, device=GPU) for _ in range(2)]
    copied = seconds_of(lambda: both[0].copy_(both[1]))
    both.clear()
    a, b = (torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    product = seconds_of(lambda: a @ b)
    return {
        **software(),
        "GPU": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory GiB": properties.total_memory / 2**30,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "copy TB/s, both ways": 8 * ELEMENTS / copied / 1e12,
        "bf16 product TFLOP/s": 2 * 8192**3 / product / 1e12,
    }


def stand_in():
    return software()
