"""Devices, workloads and clusters that the papers describe, as profiles (C eq. 3).

``published.json`` beside this module holds what the papers print, and says of each figure whether a paper reports it or
how it was derived, with its source. Where a paper gives no times for a device and a workload, they follow from the
device's sustained FLOP per second and the workload's FLOP per sample. Such figures are right in their order of
magnitude and in their ratios; `lightning-hetero profile` measures a device.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_number
from lightning_hetero.simulate.devices.device_profile import DeviceProfile
from lightning_hetero.simulate.devices.names import find_name

__all__ = [
    "PublishedDevice",
    "PublishedWorkload",
    "cluster_devices",
    "cluster_profiles",
    "device_profile",
    "price_per_hour",
    "published_clusters",
    "published_devices",
    "workload_named",
    "workloads",
]

FILE = Path(__file__).with_name("published.json")
CORES = re.compile(r"([1-9]\d{0,5})\s*-?\s*cores?", re.I)
SHARE = re.compile(r"(?P<device>.+?)\s*@\s*(?P<percent>\d+(?:\.\d+)?)\s*%")


@checked_keywords
@dataclass(frozen=True)
class PublishedDevice:
    """Device of a paper.

    Args:
        name: as :func:`device_profile` takes it.
        tflops: 10^12 FLOP per second that it sustains in training, of one core if ``per_core``.
        memory_gb: memory in GB, of the whole server if ``per_core``.
        basis: ``"reported"`` or ``"derived"``, of ``tflops``.
        how: sentence that says how it was derived.
        source: paper, and table, figure or section.
        price_per_hour: US dollars, ``None`` if no paper gives it.
        per_core: whether the name is written with a number of cores, as in ``"12 cores"``.
    """

    name: str
    tflops: float
    memory_gb: float
    basis: str
    how: str
    source: str
    price_per_hour: float | None = None
    per_core: bool = False


@checked_keywords
@dataclass(frozen=True)
class PublishedWorkload:
    """Model and data set of a paper.

    Args:
        name: as :func:`device_profile` takes it.
        model: name of the model.
        dataset: name of the data set.
        parameters: number of parameters.
        gradient_bytes: bytes of a gradient in float32.
        gflop: 10^9 FLOP of training on a sample.
        tensors: number of parameter tensors, which gives the fixed time of a batch.
        total_batch_size: ``B`` of the paper (``B_0``), ``None`` if it gives none.
        samples: samples of an epoch, ``None`` if unknown.
        samples_per_gb: samples that fit into a GB of memory, ``None`` if unknown.
        basis: ``"reported"`` or ``"derived"``, of ``gflop``.
        how: sentence that says how it was derived.
        source: paper, and table, figure or section.
    """

    name: str
    model: str
    dataset: str
    parameters: int
    gradient_bytes: int
    gflop: float
    tensors: int
    total_batch_size: int | None
    samples: int | None
    samples_per_gb: float | None
    basis: str
    how: str
    source: str


@cache
def _table() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


@cache
def published_devices() -> dict[str, PublishedDevice]:
    """Return the devices by name.

    Example:
        >>> round(published_devices()["A100"].tflops / published_devices()["RTX6000"].tflops, 2)
        3.42
    """
    fields = ("tflops", "memory_gb", "basis", "how", "source", "price_per_hour", "per_core")
    return {
        name: PublishedDevice(name, **{field: entry[field] for field in fields if field in entry})
        for name, entry in _table()["devices"].items()
    }


@cache
def workloads() -> dict[str, PublishedWorkload]:
    """Return the workloads by name.

    Example:
        >>> workloads()["resnet50-imagenet"].total_batch_size
        100
    """
    fields = [field for field in PublishedWorkload.__dataclass_fields__ if field != "name"]
    return {
        name: PublishedWorkload(name, **{field: entry.get(field) for field in fields})
        for name, entry in _table()["workloads"].items()
    }


def published_clusters() -> dict[str, str]:
    """Return what each cluster is, by name.

    Example:
        >>> published_clusters()["B"]
        '16 GPUs of ten servers (Cannikin, Table 4)'
    """
    return {name: f"{entry['what']} ({entry['source']})" for name, entry in _table()["clusters"].items()}


def workload_named(name: str) -> PublishedWorkload:
    """Return a workload.

    Raises:
        UnknownNameError: if there is none of that name.

    Example:
        >>> workload_named("bert-squad").parameters
        110000000
    """
    return workloads()[find_name("workload", name, workloads())]


def price_per_hour(name: str) -> float | None:
    """Return the price of an hour of a device in US dollars, ``None`` if no paper gives it.

    Example:
        >>> price_per_hour("A100"), price_per_hour("T4")
        (4.097, None)
    """
    device, share, _ = _parts(name)
    return None if device.price_per_hour is None else device.price_per_hour * share


@checked_keywords
def device_profile(name: str, workload: str, jitter: float = 0.0) -> DeviceProfile:
    """Return the profile of a published device that trains a published workload.

    Args:
        name: device, such as ``"A100"``; ``"12 cores"`` of a server; ``"RTX6000@25%"`` for a share of a device.
        workload: such as ``"resnet50-imagenet"``.
        jitter: relative standard deviation of each time, ``>= 0``.

    Raises:
        UnknownNameError: if a name is unknown; the nearest ones and all that are allowed are named.

    Example:
        >>> fast, slow = (device_profile(name, "resnet50-imagenet") for name in ("A100", "RTX6000"))
        >>> round((slow.q + slow.k) / (fast.q + fast.k), 2)
        3.42
        >>> round(device_profile("RTX 3090", "resnet152-imagenet100").seconds(183), 6)
        1.0
    """
    device, share, cores = _parts(name)
    what = workload_named(workload)
    q, s, k, m = _reported(device, what) or _derived(device, what, cores)
    memory = None
    if what.samples_per_gb is not None and not device.per_core:
        memory = max(int(device.memory_gb * what.samples_per_gb * share), 1)
    shown = device.name if not device.per_core else f"{cores} core{'s' * (cores > 1)}"
    shown += f"@{100 * share:.4g}%" if share < 1 else ""
    return DeviceProfile(q / share, s / share, k / share, m / share, memory, jitter, name=shown)


@checked_keywords
def cluster_profiles(name: str, workload: str, jitter: float = 0.0) -> list[DeviceProfile]:
    """Return the profiles of all workers of a published cluster.

    Args:
        name: of the cluster, such as ``"B"``.
        workload: such as ``"resnet50-imagenet"``.
        jitter: relative standard deviation of each time, ``>= 0``.

    Raises:
        UnknownNameError: if a name is unknown.

    Example:
        >>> [profile.name for profile in cluster_profiles("A", "bert-squad")]
        ['A5000', 'A4000', 'P4000']
    """
    return [device_profile(worker, workload, jitter) for worker in cluster_devices(name)]


def cluster_devices(name: str) -> list[str]:
    """Return the names of the devices of a published cluster, one for each worker.

    Raises:
        UnknownNameError: if there is no cluster of that name.

    Example:
        >>> cluster_devices("D-H2")
        ['9 cores', '12 cores', '18 cores']
    """
    entry = _table()["clusters"][find_name("cluster", name, _table()["clusters"])]
    found = []
    for worker in entry["workers"]:
        share = worker.get("share", 1.0)
        found += [worker["device"] + (f"@{100 * share:.4g}%" if share < 1 else "")] * worker["count"]
    return found


def _reported(device: PublishedDevice, workload: PublishedWorkload) -> tuple[float, float, float, float] | None:
    for entry in _table()["profiles"]:
        if (entry["device"], entry["workload"]) == (device.name, workload.name):
            return entry["q"], entry["s"], entry["k"], entry["m"]
    return None


def _derived(device: PublishedDevice, workload: PublishedWorkload, cores: int) -> tuple[float, float, float, float]:
    rules = _table()["rules"]
    per_sample = workload.gflop / (1e3 * device.tflops * cores)
    fixed = 2 * workload.tensors * rules["launch_seconds"]
    forward = rules["forward_share"]
    return forward * per_sample, fixed, (1.0 - forward) * per_sample, fixed


def _parts(name: str) -> tuple[PublishedDevice, float, int]:
    """Return the device, the share of it, and the number of cores that a name stands for."""
    if not isinstance(name, str):
        raise TypeError(f"device {name!r} must be a string, such as 'A100'; {_allowed_devices()}")
    share, cores = 1.0, 1
    match = SHARE.fullmatch(name.strip())
    if match:
        name, percent = match["device"], match["percent"]
        share = check_number(
            f"the share of {name!r} in percent", float(percent), low=0.0, high=100.0, include_low=False
        )
        share /= 100.0
    number = CORES.fullmatch(name.strip())
    if number:
        name, cores = "core", int(number[1])
    allowed = published_devices()
    return allowed[find_name("device", name, allowed, _allowed_devices())], share, cores


def _allowed_devices() -> str:
    names = [name for name, device in published_devices().items() if not device.per_core]
    return f"Allowed are {', '.join(names)}, a number of cores ('12 cores'), and shares of them ('A100@50%')."
