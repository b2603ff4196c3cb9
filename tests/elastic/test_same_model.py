"""Models that differ between ranks are refused by name on every rank, before anything is merged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.comm import PlanMismatchError
from lightning_hetero.elastic import ElasticConfig, ElasticEngine
from tests.helpers import run_ranks


def _layers(odd):
    names = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 2)}
    if odd == "shape":
        names["second"] = nn.Linear(4, 3)
    if odd == "order":
        names = dict(reversed(names.items()))
    if odd == "more":
        names["third"] = nn.Linear(2, 2)
    if odd == "type":
        names["second"] = nn.Linear(4, 2, dtype=torch.float64)
    if odd == "buffer":
        names["second"].register_buffer("count", torch.zeros(3))
    return nn.ModuleDict(names)


def _attach(rank, odd):
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    engine, model = ElasticEngine(ElasticConfig(), rank=rank, world_size=3), _layers(odd if rank == 2 else None)
    try:
        engine.attach(model)
    except PlanMismatchError as error:
        return str(error)
    return [p.tolist() for p in model.parameters()]


SAYS = {
    "shape": "number 3: rank 0: second.weight [2, 4] float32, rank 1: second.weight [2, 4] float32, rank 2: "
    "second.weight [3, 4] float32",
    "order": "number 1: rank 0: first.weight [4, 3] float32, rank 1: first.weight [4, 3] float32, rank 2: "
    "second.weight [2, 4] float32",
    "more": "number 5: rank 0: nothing, rank 1: nothing, rank 2: third.weight [2, 2] float32",
    "type": "rank 2: second.weight [2, 4] float64",
    "buffer": "number 5: rank 0: nothing, rank 1: nothing, rank 2: second.count [3] float32",
}


@pytest.mark.parametrize("odd", SAYS)
def test_a_model_that_differs_is_refused_on_every_rank(odd):
    messages = run_ranks(_attach, 3, odd)
    assert len(set(messages)) == 1
    assert SAYS[odd] in messages[0]


def test_values_may_differ_and_are_rank_0s_from_then_on():
    torch.manual_seed(0)
    assert run_ranks(_attach, 3, None) == [[p.tolist() for p in _layers(None).parameters()]] * 3
