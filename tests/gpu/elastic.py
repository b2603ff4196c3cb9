"""Workers of 25 and 100 ms a batch claim batches in proportion, though both hosts could queue them at once."""

import time

import torch
from torch import nn

from tests.gpu.common import Busy, cycles_per_second, ranks

BATCHES, SIZE = 40, 4


def _claim(rank, device, seconds):
    import torch.distributed as dist

    from lightning_hetero.data import PermutationStream
    from lightning_hetero.elastic import ElasticConfig, ElasticEngine

    dist.init_process_group("gloo")
    if device.type == "cuda":
        cycles_per_second()
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = ElasticEngine(ElasticConfig("mean", mega_batch_batches=BATCHES), rank=rank, world_size=2)
    engine.attach(model, [optimizer])
    sampler = engine.shard(PermutationStream(2 * BATCHES * SIZE, shuffle=False, seed=0), batch_size=SIZE)
    dist.barrier()
    begins = [time.perf_counter()]
    for batch in sampler:
        engine.begin_batch()
        optimizer.zero_grad()
        x = torch.ones(len(batch), 4, device=device)
        Busy.apply(model(x), device, seconds[rank] / 3).sum().backward()
        optimizer.step()
        if engine.end_batch() is not None:
            begins.append(time.perf_counter())
    return [list(record.updates) for record in engine.merges], begins[-1] - begins[-2]


def elastic(figures, device):
    """Two processes take turns on one GPU: each is twice as slow, and their ratio is the same."""
    seconds = (0.025, 0.1) if device.type == "cuda" else (0.005, 0.02)
    (updates, taken), _ = ranks(_claim, 2, device, seconds)
    fast, slow = updates[-1]
    figures.add({"updates": updates[-1], "fast over slow": fast / max(slow, 1)})
    figures["seconds over ideal"] = taken / (BATCHES / sum(1 / s for s in seconds))
    figures.must(fast + slow == BATCHES, f"{fast} and {slow} of {BATCHES} batches were claimed")
    if device.type == "cuda":
        figures.must(2.8 <= fast / max(slow, 1) <= 5.5, "claims do not follow the speed of the GPUs")
