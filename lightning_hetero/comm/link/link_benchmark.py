"""What is measured of a link before training: its latency; for ``compression="auto"``, which chooses here, its rate."""

import logging
import time

import numpy as np
import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.compression.host.encoder import cpu_encoder
from lightning_hetero.compression.layout import Layout
from lightning_hetero.compression.wire_format import MessageFormat
from lightning_hetero.core.compression.settings import blocks_per_rank

__all__ = ["encode_seconds", "exchange_seconds", "latency"]

log = logging.getLogger("lightning_hetero")

PROBE_BYTES = 1_000_000
REPEATS = 3
SAMPLE_ELEMENTS = 8_000_000


def latency(control: ControlPlane, topology: Topology, device: torch.device) -> float:
    """Seconds of an exchange of next to nothing: the best of three, of the slowest rank; a collective call."""
    return float(control.gather(np.array([exchange_seconds(64, topology, device)])).max())


def exchange_seconds(size: int, topology: Topology, device: torch.device) -> float:
    """Measure an exchange of messages of a size: the best of some; all ranks call it together."""
    rows = torch.zeros((topology.size, size), dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        topology.gather(rows).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def encode_seconds(numel: int, density: float, value_dtype: str) -> float:
    """Error feedback, selection and merging on this processor at a density, from 8 million elements at most."""
    sample = min(numel, SAMPLE_ELEMENTS)
    layout = Layout.of([("probe", sample)], 16)
    k = blocks_per_rank(layout.num_blocks, density, 2)
    encoder = cpu_encoder(layout, MessageFormat(layout.num_blocks, k, 16, value_dtype))
    gradient = torch.rand(sample, dtype=torch.float32)
    message = torch.zeros(encoder.form.num_bytes, dtype=torch.uint8)
    best = float("inf")
    for step in range(REPEATS):
        begin = time.perf_counter()
        encoder.accumulate(layout.slots[0], gradient, 1.0)
        encoder.encode(message, step=step)
        encoder.merge(encoder.read(message[None], step=step) or [])
        gradient.copy_(encoder.merged[:sample])
        encoder.finish()
        best = min(best, time.perf_counter() - begin)
    return best * numel / sample
