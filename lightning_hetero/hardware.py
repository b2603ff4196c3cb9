"""Identity of a worker, its open-loop capacity, and its memory bound."""

import logging
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.core.batching.peak_flops import cpu_peak_flops, gpu_peak_flops

__all__ = [
    "call_device",
    "capacity",
    "cpu_quota",
    "cpu_share",
    "device_name",
    "identity",
    "is_out_of_memory",
    "memory_limit",
    "probe_largest_batch",
]


log = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    *("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED"),
)
"""Error texts of torch on CPUs, and of libraries that found no memory for their own work space."""


def identity(device: torch.device, local_rank: int) -> str:
    """Name the hardware behind a rank: host and GPU UUID, or host and slot for a CPU worker.

    Example:
        >>> identity(torch.device("cpu"), 1).endswith("/cpu:1")
        True
    """
    if device.type == "cuda":
        return f"{platform.node()}/{torch.cuda.get_device_properties(device).uuid}"
    return f"{platform.node()}/{device.type}:{local_rank}"


_called: list[str] = []


def call_device(name: str) -> None:
    """Give this process's device another name in reports, such as that of the device it emulates."""
    _called[:] = [name] if name else []


def device_name(device: torch.device) -> str:
    """Return the name of a device for people to read.

    Example:
        >>> len(device_name(torch.device("cpu"))) > 0
        True
    """
    if _called:
        return _called[0]
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()}, {cpu_share():.3g} cores"


def _processor() -> str:
    """Return the model of the CPU, in as few words as possible."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine() or "CPU"
    for word in ("(R)", "(TM)", "Processor", "CPU"):
        name = name.replace(word, " ")
    return " ".join(name.partition("@")[0].split()) or "CPU"


def cpu_share() -> float:
    """Return the cores that this process may use, by affinity and CPU-bandwidth cgroup (version 1 or 2)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return min([float(affinity), *_cgroup_quotas()])


def cpu_quota() -> float | None:
    """Return the cores that a CPU-bandwidth cgroup allows this process, ``None`` if they suffice for its threads."""
    quota = min(_cgroup_quotas(), default=math.inf)
    return quota if quota < torch.get_num_threads() else None


def memory_limit() -> int | None:
    """Return the bytes of memory that a cgroup allows this process, ``None`` without a limit (version 1 or 2)."""
    limits = [limit for folder in _cgroup_folders("memory") for limit in _limit(folder)]
    return min(limits, default=None)


def _limit(folder: Path) -> list[int]:
    """Return the limit of a memory cgroup in a list, which is empty if it has none or does not show it."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            limit = int((folder / name).read_text())
        except (OSError, ValueError):  # "max" is no limit
            continue
        return [limit] if limit < 1 << 60 else []  # version 1 writes "none" as almost 2 ** 63
    return []


def _cgroup_quotas() -> list[float]:
    """Return the quotas, in cores, of this process's cgroup and of every cgroup around it."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        quotas += _quota([folder / "cpu.max"]) or _quota([folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"])
    return quotas


def _cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup of a controller, and of every cgroup around it."""
    folders = []
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = "/sys/fs/cgroup" if not controllers else f"/sys/fs/cgroup/{controller}"
            parts = [part for part in path.split("/") if part]
            folders += [Path("/".join([root, *parts[:depth]])) for depth in range(len(parts), -1, -1)]
    except (OSError, ValueError):
        log.debug("the cgroup of this process could not be read", exc_info=True)
    return folders


def _quota(files: list[Path]) -> list[float]:
    """Return quota over period in a list, which is empty if the cgroup has no quota or does not show it."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return [] if quota in ("max", "-1") else [int(quota) / int(period)]
    except (OSError, ValueError):
        return []


def capacity(device: torch.device) -> float:
    """Return the peak half-precision FLOP/s of a worker, for the open-loop split (dynamic batching, sec. III-B).

    For a GPU it follows from the name, else from the clocks; for a CPU from the cores (under a quota, the share of
    them) and the vector width, see :mod:`lightning_hetero.core.batching.peak_flops`. Only ratios between workers
    matter, and only where nothing was measured yet.

    Example:
        >>> capacity(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        kilohertz = getattr(properties, "clock_rate", None)  # missing in some versions of torch
        return gpu_peak_flops(
            properties.name,
            (properties.major, properties.minor),
            properties.multi_processor_count,
            None if kilohertz is None else 1e3 * kilohertz,
            architecture="" if torch.version.hip is None else properties.gcnArchName,
        )
    cores = max(min(cpu_share(), float(torch.get_num_threads())), 1e-3)
    return cpu_peak_flops(cores, torch.backends.cpu.get_cpu_capability())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: torch's own, or one of a library below it.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
        True
        >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:132] DefaultCPUAllocator: not enough memory"))
        True
    """
    known = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return known or isinstance(error, torch.OutOfMemoryError)


def probe_largest_batch(runs: Callable[[int], bool], *, start: int, limit: int) -> int:
    """Find the largest batch that fits, by doubling and then halving the gap.

    Args:
        runs: tries one batch size and says whether it fitted.
        start: first size to try, ``>= 1``.
        limit: never try more.

    Returns:
        The largest size that ran, within 1/16 of the true bound; 0 if not even one sample fits.

    Example:
        >>> probe_largest_batch(lambda b: b <= 100, start=8, limit=1000)
        100
        >>> probe_largest_batch(lambda b: True, start=8, limit=50)
        50
    """
    good, bad, size = 0, limit + 1, min(start, limit)
    while good < limit and size < bad:
        if runs(size):
            good, size = size, min(2 * size, limit)
        else:
            bad = size
            break
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        if runs(middle):
            good = middle
        else:
            bad = middle
    return good
