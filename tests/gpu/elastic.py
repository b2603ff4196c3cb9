"""Workers of 25 and 100 ms a batch claim batches in proportion, though both hosts could queue them at once."""

import time

import torch
from torch import nn

from tests.gpu.common import CPU, GPU, Busy, ranks
from tests.gpu.outcome import require

SECONDS = (0.025, 0.1)
BATCHES, SIZE = 40, 4


def _claim(rank, device, seconds):
    import torch.distributed as dist

    from lightning_hetero.data import PermutationStream
    from lightning_hetero.elastic import ElasticConfig, ElasticEngine
    from tests.gpu import common

    dist.init_process_group("gloo")
    if device.type == "cuda":
        common.cycles_per_second()
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
        Busy.apply(model(x), seconds[rank] / 3, 2 * seconds[rank] / 3).sum().backward()
        optimizer.step()
        if engine.end_batch() is not None:
            begins.append(time.perf_counter())
    return [list(record.updates) for record in engine.merges], begins[-1] - begins[-2]


def measure(device, seconds):
    (updates, taken), _ = ranks(_claim, 2, device, seconds)
    ideal = BATCHES / sum(1 / s for s in seconds)
    return {"updates": updates[-1], "seconds over ideal": taken / ideal}


def gpu():
    figures = measure(GPU, SECONDS)
    fast, slow = figures["updates"]
    require(2.8 <= fast / slow <= 5.5, "claims do not follow the speed of the GPUs", figures)
    require(figures["seconds over ideal"] <= 1.25, "a mega-batch takes too long", figures)
    return figures


def stand_in():
    """Two CPUs that sleep: on a busy machine the times say little, so that only the direction has to be right."""
    figures = measure(CPU, (0.005, 0.02))
    fast, slow = figures["updates"]
    require(fast > slow, "the faster worker has not got more batches", figures)
    return figures
