"""Workers that exchange messages of block top-k in one process, and an averager that notes what a path tells it."""

from types import SimpleNamespace

import torch

from lightning_hetero import BlockTopK
from lightning_hetero.comm.compressors.block_topk.host_path import HostPath
from lightning_hetero.comm.compressors.block_topk.in_flight import BackwardPass, InFlight
from lightning_hetero.comm.compressors.block_topk.message_path import ModelBlocks
from lightning_hetero.comm.gradients.averager import StepFlags
from lightning_hetero.compression.host.encoder import TorchEncoder

BLOCK = 4
SIZES = {"first": 10, "second": 8, "third": 3}
PADDED = {"first": 12, "second": 8, "third": 4}


class Arrival:
    """Messages that are there; it counts who waited."""

    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


class Averager:
    """Notes what a path of messages tells it."""

    def __init__(self, *, step=0, grad_scale=None, takes_blocks=False, stale=None):
        self.step, self.grad_scale, self.takes_blocks, self.stale = step, grad_scale, takes_blocks, stale
        self.fill = 0.0 if grad_scale is None else float("inf")
        self.flags, self.counted, self.skipped, self.dropped = StepFlags(), [], [], self
        self.noted = []

    def count(self, blocks, seconds):
        self.counted.append((blocks, seconds))

    def skip(self, step, where):
        self.flags.skip()
        self.skipped.append((step, where))

    def add(self, step, where):
        self.noted.append((step, where))


def place(rank, clusters):
    """Rank's place among clusters, with no process groups behind it."""
    cluster = next(i for i, members in enumerate(clusters) if rank in members)
    return SimpleNamespace(rank=rank, cluster=cluster, size=len(clusters), is_leader=rank == clusters[cluster][0])


def model_blocks():
    parameters = {name: torch.zeros(size, requires_grad=True) for name, size in SIZES.items()}
    return ModelBlocks.of(parameters, BLOCK), parameters


def cluster(workers, density, *, clusters=None, value_dtype="float32"):
    """Paths of some workers that hold the same model, each with rows of its own."""
    clusters = clusters or tuple((rank,) for rank in range(workers))
    settings, paths = BlockTopK(density=density, block=BLOCK, value_dtype=value_dtype), []
    for rank in range(workers):
        model, _ = model_blocks()
        topology = place(rank, clusters)
        form = model.message_format(settings, density, topology.size)
        rows = torch.zeros(topology.size, form.num_bytes, dtype=torch.uint8)
        paths.append(HostPath(TorchEncoder(model.layout, form), model, topology, rows))
    return paths


def backward(path, gradients, *, weight=1.0, scale=1.0, step=0):
    """One backward pass up to the message; a gradient for each parameter, all in one bucket."""
    running, buffer = BackwardPass(weight=weight, scale=scale), torch.cat(gradients)
    running.add(buffer, list(path.model.layout.slots), torch.futures.Future(), None)
    path.accumulate(running, everything=True)
    path.write(running, step)
    return running


def exchange(paths, passes, *, step=0):
    """Give all paths the rows of all."""
    everyone = torch.stack([path.rows[path.topology.cluster] for path in paths if path.topology.is_leader])
    sent = []
    for path, running in zip(paths, passes, strict=True):
        path.rows.copy_(everyone)
        sent.append(InFlight(path.rows, step, Arrival(), running.finite))
    return sent


def flat_of(gradients):
    """Gradients in the layout: each parameter padded to whole blocks."""
    padded = [torch.nn.functional.pad(g, (0, -g.numel() % BLOCK)) for g in gradients]
    return torch.cat(padded)
