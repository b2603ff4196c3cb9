"""Facts about this process that need no measurement: versions, its device, memory, cores, network interfaces."""

import os
import platform
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_hetero import __version__
from lightning_hetero.hardware import cpu_share, identity, memory_limit

__all__ = [
    "SOCKETS",
    "DeviceFacts",
    "ProcessFacts",
    "device_facts",
    "installed_versions",
    "process_facts",
    "unmet",
    "vulnerable",
]

PACKAGES = (
    *("torch", "lightning", "pytorch-lightning", "torchmetrics", "numpy", "scipy"),
    *("accelerate", "transformers", "triton", "numba"),
)
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interfaces to use; each machine has its own."""

_TAKEN_OVER = "was published by an attacker and steals credentials: uninstall it, and replace those it could read"
_HYPERPARAMETERS = "runs code that hyperparameters in a checkpoint name"
_WEIGHTS_ONLY = "may run code from a file in spite of weights_only=True"
ADVISORIES = (
    ("lightning", ">=2.6.2,<=2.6.3", "GHSA-w37p-236h-pfx3", _TAKEN_OVER, "2.6.6"),
    ("pytorch-lightning", ">=2.6.2,<=2.6.3", "GHSA-w37p-236h-pfx3", _TAKEN_OVER, "2.6.6"),
    ("lightning", "<2.6.6", "CVE-2026-58659", _HYPERPARAMETERS, "2.6.6"),
    ("pytorch-lightning", "<2.6.6", "CVE-2026-58659", _HYPERPARAMETERS, "2.6.6"),
    ("torch", "<2.6.0", "CVE-2025-32434", _WEIGHTS_ONLY, "2.6.0"),
    ("torch", "<2.10.0", "CVE-2026-24747", _WEIGHTS_ONLY, "2.10.0"),
)
"""Package, vulnerable versions, advisory, what it says, and the first version that is safe from it."""


@dataclass(frozen=True)
class DeviceFacts:
    """Device of a worker.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.
        name: of the GPU, or of the processor.
        identity: name that no other device has; it begins with that of the host.
        memory: bytes in all; for a CPU those of the host, or of its cgroup.
        free: bytes that are not in use.
        capability: compute capability of a GPU, such as ``"9.0"``.
    """

    kind: str
    name: str
    identity: str
    memory: int
    free: int
    capability: str = ""


@dataclass(frozen=True)
class ProcessFacts:
    """Process of a rank and where it runs.

    Args:
        rank: of the process; when there is only one, the place of its device.
        host: name of the machine.
        device: its device.
        cores: cores that the process may use, by affinity and quota.
        threads: threads of torch.
        host_memory: bytes of the machine.
        memory_limit: bytes that a cgroup allows, ``None`` without a limit.
        interfaces: names of the machine's network interfaces.
        versions: what is installed.
        load: programs that want a core, before anything is measured; 0 if the system does not say.
        cpus: cores that the process may use by affinity, such as ``"0-3"``; empty if the system does not say.
        sockets: interfaces that gloo and NCCL are told to use, by variable.
    """

    rank: int
    host: str
    device: DeviceFacts
    cores: float = 1.0
    threads: int = 1
    host_memory: int = 0
    memory_limit: int | None = None
    interfaces: tuple[str, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)
    load: float = 0.0
    cpus: str = ""
    sockets: Mapping[str, str] = field(default_factory=dict)


def installed_versions() -> dict[str, str | None]:
    """Return the versions of Python and the packages that matter, ``None`` for what is not installed."""
    found: dict[str, str | None] = {"lightning-hetero": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda or (torch.version.hip and f"HIP {torch.version.hip}")
    with_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if with_nccl else None
    return found


def unmet(versions: Mapping[str, str | None], requires: Iterable[str]) -> list[str]:
    """Return a sentence for each requirement that an installed package does not meet; of extras, too.

    Example:
        >>> unmet({"lightning": "2.9", "scipy": None}, ["lightning<2.7,>=2.5", "scipy>=1.0"])
        ["lightning 2.9 is installed, and lightning-hetero needs <2.7,>=2.5: pip install 'lightning<2.7,>=2.5'"]
    """
    found = []
    for line in requires:
        requirement = Requirement(line)
        version, wanted = versions.get(requirement.name), requirement.specifier
        if version and not wanted.contains(version, prereleases=True):
            found.append(
                f"{requirement.name} {version} is installed, and lightning-hetero needs {wanted}: "
                f"pip install '{requirement.name}{wanted}'"
            )
    return list(dict.fromkeys(found))


def vulnerable(versions: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each published vulnerability of an installed package that concerns a training.

    Example:
        >>> vulnerable({"torch": "2.9.1+cpu", "lightning": None})  # doctest: +ELLIPSIS
        ["torch 2.9.1+cpu may run code from a file ... (CVE-2026-24747): pip install 'torch>=2.10.0'"]
    """
    return [
        f"{name} {versions[name]} {what} ({advisory}): pip install '{name}>={safe}'"
        for name, affected, advisory, what, safe in ADVISORIES
        if SpecifierSet(affected).contains(versions.get(name) or safe, prereleases=True)
    ]


def process_facts(rank: int, device: torch.device, local_rank: int) -> ProcessFacts:
    """Return the facts of this process."""
    return ProcessFacts(
        rank,
        platform.node(),
        device_facts(device, local_rank),
        cpu_share(),
        torch.get_num_threads(),
        _host_memory()[0],
        memory_limit(),
        tuple(name for _, name in socket.if_nameindex()),
        installed_versions(),
        os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        _table("/proc/self/status").get("Cpus_allowed_list", ""),
        {name: os.environ[name] for name in SOCKETS if name in os.environ},
    )


def device_facts(device: torch.device, local_rank: int) -> DeviceFacts:
    """Return the facts of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        capability = f"{properties.major}.{properties.minor}"
        return DeviceFacts("cuda", properties.name, identity(device, local_rank), total, free, capability)
    total, free = _host_memory()
    limit = memory_limit() or total
    return DeviceFacts("cpu", _processor(), identity(device, local_rank), min(total, limit), min(free, limit))


def _processor() -> str:
    """Return the name of the processor."""
    names = _table("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine()
    return " ".join(names.split())


def _host_memory() -> tuple[int, int]:
    """Return the bytes of the machine's memory, and those that are free for programs; 0 if it does not say."""
    table = _table("/proc/meminfo")
    if "MemTotal" in table and "MemAvailable" in table:
        total, free = (1024 * int(table[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        return total, free
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not this system's
        return 0, 0
    return total, total


def _table(path: str) -> dict[str, str]:
    """Return the lines ``name: value`` of a file of the system, the first of each name."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in reversed(lines)]
    return {name.strip(): value.strip() for name, _, value in pairs}
