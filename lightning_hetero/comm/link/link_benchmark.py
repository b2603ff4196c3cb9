"""Measurement of a link before training: latency, and where a density is chosen also rate and encoding time."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import blocks_per_rank

__all__ = [
    "BENCHMARK",
    "BenchmarkSettings",
    "all_reduce_seconds",
    "encode_seconds",
    "exchange_seconds",
    "slowest_exchange",
]


@dataclass(frozen=True)
class BenchmarkSettings:
    """Size and number of the measurements.

    Args:
        latency_bytes: bytes of a message so small that only the latency counts.
        probe_bytes: bytes of a message from which the rate follows.
        repeats: measurements of each kind; the shortest counts.
        max_elements: most elements that are encoded; times of larger gradients are extrapolated.
        block_elements: elements of a block.
    """

    latency_bytes: int = 64
    probe_bytes: int = 1_000_000
    repeats: int = 3
    max_elements: int = 8_000_000
    block_elements: int = 16


BENCHMARK = BenchmarkSettings()


def slowest_exchange(size: int, control: ControlPlane, topology: Topology, device: torch.device) -> float:
    """Measure the seconds of an exchange of messages of ``size`` bytes on the slowest rank; a collective call."""
    return float(control.gather(np.array([exchange_seconds(size, topology, device)])).max())


def exchange_seconds(size: int, topology: Topology, device: torch.device) -> float:
    """Measure the seconds of an exchange of messages of ``size`` bytes, the best of three; a collective call."""
    rows = torch.zeros((topology.size, size), dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(BENCHMARK.repeats):
        dist.barrier()
        begin = time.perf_counter()
        topology.all_gather(rows).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def all_reduce_seconds(size: int, device: torch.device, group: Any = None) -> float:
    """Measure the seconds of an all-reduce of ``size`` bytes in float32, the best of three; a collective call.

    Args:
        size: bytes of each rank.
        device: where the gradients are.
        group: process group, ``None`` for the default one.
    """
    values = torch.zeros(max(size // 4, 1), device=device)
    seconds = []
    for _ in range(BENCHMARK.repeats + 1):  # the first connects the ranks
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def encode_seconds(numel: int, density: float, value_dtype: str) -> float:
    """Measure the seconds of error feedback, selection and merging of a gradient on this CPU, the best of three."""
    sample = min(numel, BENCHMARK.max_elements)
    block = BENCHMARK.block_elements
    layout = Layout.of([("probe", sample)], block)
    k = blocks_per_rank(layout.num_blocks, density, 2)
    encoder = cpu_encoder(layout, MessageFormat(layout.num_blocks, k, block, value_dtype))
    gradient = torch.rand(sample, dtype=torch.float32)
    message = torch.zeros(encoder.form.num_bytes, dtype=torch.uint8)
    best = float("inf")
    for step in range(BENCHMARK.repeats):
        begin = time.perf_counter()
        encoder.accumulate(layout.slots[0], gradient, 1.0)
        encoder.encode(message, step=step)
        encoder.merge(encoder.read(message[None], step=step) or [])
        gradient.copy_(encoder.merged[:sample])
        encoder.finish()
        best = min(best, time.perf_counter() - begin)
    return best * numel / sample
