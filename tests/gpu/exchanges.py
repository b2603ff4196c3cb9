"""Every exchange of gradients with collectives that come late.

A missing wait shows only when a collective comes later than its reader. So each collective waits behind 20 ms of device
time, on a stream of its own: who reads without waiting for it reads the old values, each time.
"""

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu.common import CPU, busy, cycles_per_second, noted, place, ranks
from tests.helpers import trainer_of

LATE = 0.02
COLLECTIVES = (
    *("allreduce", "allgather", "_allgather_base", "all_gather_single", "broadcast", "reduce", "gather"),
    *("reduce_scatter", "_reduce_scatter_base", "scatter"),
)
"""Methods of a process group in which torch's own collectives and ours end."""
LARGE, SMALL = (2048, 1024), (64, 48)
BUCKETS, STEPS = 5, 4
BESIDE = ("dense", "stale", "block top-k, sparse optimizer", "PowerSGD")


def exchanges():
    from lightning_hetero import BlockTopK
    from lightning_hetero.core.compression.settings import LowRank

    blocks = BlockTopK(density=0.02, block=16, warmup_steps=1)
    return {
        "dense": {},
        "stale": {"staleness": 1},
        "block top-k": {"compression": blocks},
        "block top-k, sparse optimizer": {"compression": blocks, "sparse_optimizer": True},
        "stale block top-k": {"compression": blocks, "staleness": 1},
        "fp16": {"compression": "fp16"},
        "bf16": {"compression": "bf16"},
        "PowerSGD": {"compression": LowRank(rank=2, start=2)},
        "skip": {"on_nonfinite": "skip"},
    }


def on_gpu(value):
    """Whether a tensor, or one in a list of lists of them, is on a GPU."""
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    return isinstance(value, list | tuple) and any(map(on_gpu, value))


def come_late(device, seconds):
    """Let every collective of this process come late: on a GPU behind its stream, on a CPU as the host sees it."""
    if device.type == "cuda":
        cycles_per_second()

    def wrapped(call):
        def late(group, tensors, *args, **kwargs):
            if not on_gpu(tensors):
                busy(CPU, seconds / 10)
                return call(group, tensors, *args, **kwargs)
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                busy(side.device, seconds)
                work = call(group, tensors, *args, **kwargs)
            if args and not getattr(args[-1], "asyncOp", True):  # such a call is over for its caller when it returns
                current.wait_stream(side)
            return work

        return late

    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, wrapped(getattr(dist.ProcessGroup, name)))


class Exact(L.LightningModule):
    """Gradients of the loss are the same numbers on all devices: a fixed matrix times a number of the batch."""

    def __init__(self, shape):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(BUCKETS))
        self.matrices = []

    def on_train_start(self):
        seeds = torch.Generator().manual_seed(0)
        for weight in self.weights:
            values = torch.randint(-(2**15), 2**15, weight.shape, generator=seeds) / 2**15
            self.matrices.append(values.to(self.device))
        staleness = self.trainer.strategy.engine.hook_state.staleness
        if hasattr(staleness, "make_all_stale"):
            staleness.make_all_stale()

    def training_step(self, batch, batch_idx):
        parts = [(weight * matrix).sum() for weight, matrix in zip(self.weights, self.matrices, strict=True)]
        return sum(parts) * batch[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2**-4)


def _train(rank, devices, backend, shape, kinds, late):
    """Weights after some steps of each exchange, on rank 0."""
    from lightning_hetero import HeteroDDPStrategy

    device = devices[rank]
    where = place(rank, len(devices), device)
    if late:
        come_late(device, late)
    sizes, found = [6, 2][: len(devices)], {}
    for name in kinds:
        strategy = HeteroDDPStrategy(
            local_batch_sizes=sizes,
            process_group_backend=backend,
            bucket_cap_mb=4 * shape[0] * shape[1] / 2**20,
            report=False,
            **exchanges()[name],
        )
        model = Exact(shape)
        numbers = TensorDataset(1.0 + torch.arange(sum(sizes) * STEPS) % 5)
        trainer = trainer_of(strategy, 1, max_epochs=1, **where)
        trainer.fit(model, DataLoader(numbers, sum(sizes) // len(devices), shuffle=False))
        found[name] = torch.stack([w.detach().cpu() for w in model.weights]).numpy() if rank == 0 else None
    return found


def off(found, expected):
    """Share of the elements that are not those expected: rounding may choose another block, a race spoils a bucket."""
    scale = abs(expected).max() or 1.0
    return float((abs(found - expected) > 0.01 * scale).mean()) if found.shape == expected.shape else 1.0


def delays(figures, device):
    known, kinds = figures.known.get("machine", {}).get("ranks over NCCL", 1), list(exchanges())
    shape, worlds = SMALL, {"gloo": ((device, device), kinds)}
    if device.type == "cuda":
        shape = LARGE
        # One worker has nobody to send compressed or stale gradients to.
        worlds = {
            "nccl": ((device,) * known, kinds if known > 1 else kinds[:1]),
            **worlds,
            "gloo, beside a CPU": ((device, CPU), BESIDE),
        }
    references = {}
    for name, (devices, some) in worlds.items():
        with noted(figures, name):
            count = len(devices)
            if count not in references:
                references[count] = ranks(_train, count, (CPU,) * count, "gloo", shape, kinds, 0.0)[0]
            found = ranks(_train, count, devices, name[:4], shape, some, LATE)[0]
            for kind, weights in found.items():
                share = figures[f"{name}, {kind}: share off"] = off(weights, references[count][kind])
                figures.must(share < 1e-3, f"{name}, {kind}: {100 * share:.2g} % of the weights are not the CPU's")
                figures.must(abs(weights).max() > 0, f"{name}, {kind}: nothing was trained")
