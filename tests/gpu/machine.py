"""The machine and the software: versions, tools, and whether two ranks can share one GPU over NCCL."""

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
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return {"torch": torch.__version__, "C compiler": compiler or "none", "Python.h": header.exists()}


def _hardware(rank, device):
    properties = torch.cuda.get_device_properties(device)
    return {
        "GPU": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": properties.total_memory / 2**30,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
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
    if device.type == "cuda":
        figures.add(ranks(_hardware, 1, device)[0])
    try:  # NCCL refuses two ranks on one GPU unless a newer version is told to allow it
        together = ranks(_meet, 2, device, timeout=20)
    except (RankError, TimeoutError) as error:
        together, figures["two ranks over NCCL"] = [], str(error).strip().rpartition("\n")[2][:200]
    figures["ranks over NCCL"] = 2 if together == [8.0, 8.0] else 1
