"""The machine and the software: versions, bandwidth of a copy, speed of a product, and NCCL with one GPU."""

import shutil
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.common import place, ranks, synchronize
from tests.ranks import RankError


def software():
    """What the other checks rely on."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    tools = {tool: shutil.which(tool) or "none" for tool in ("compute-sanitizer", "nvidia-cuda-mps-control")}
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return {"torch": torch.__version__, "C compiler": compiler or "none", "Python.h": header.exists(), **tools}


def seconds_of(function, device, rounds=10):
    """Median seconds of a call on a device, after three that do not count."""
    from time import perf_counter

    found = []
    for turn in range(rounds + 3):
        synchronize(device)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) * 1e-3
        else:
            start = perf_counter()
            function()
            seconds = perf_counter() - start
        found += [seconds] if turn >= 3 else []
    return sorted(found)[rounds // 2]


def _ceilings(rank, device):
    known = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known = {
            "GPU": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory GiB": properties.total_memory / 2**30,
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    elements, side = (2**28, 8192) if device.type == "cuda" else (2**20, 256)
    both = [torch.randn(elements, device=device) for _ in range(2)]
    copied = seconds_of(lambda: both[0].copy_(both[1]), device)
    both.clear()
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = seconds_of(lambda: a @ b, device)
    return {
        **known,
        "copy TB/s, both ways": 8 * elements / copied / 1e12,
        "bf16 product TFLOP/s": 2 * side**3 / product / 1e12,
    }


def _meet(rank, device):
    place(rank, 2, device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=2)
    value = torch.ones(2**20, device=device)
    for _ in range(3):
        dist.all_reduce(value)
    synchronize(device)
    return float(value[-1])


def machine(figures, device):
    figures.add(software())
    figures.add(ranks(_ceilings, 1, device)[0])
    try:  # NCCL refuses two ranks on one GPU unless a newer version is told to allow it
        together = ranks(_meet, 2, device, timeout=20)
    except (RankError, TimeoutError) as error:
        together, figures["two ranks over NCCL"] = [], str(error).strip().rpartition("\n")[2][:200]
    figures["ranks over NCCL"] = 2 if together == [8.0, 8.0] else 1
