"""What elastic averaging makes of local optimizers: the global model's momentum, and which cannot be merged."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero.data import PermutationStream
from lightning_hetero.elastic import ElasticConfig, ElasticEngine
from lightning_hetero.elastic.optimizers import outer_momentum, unsupported_reason
from tests.helpers import run_ranks


def made(cls, **arguments):
    return cls([nn.Parameter(torch.zeros(2, requires_grad=True))], lr=0.1, **arguments)


PLAIN = lambda: [made(torch.optim.SGD)]  # noqa: E731
KINDS = {
    "plain": (PLAIN, 0.9),
    "momentum": (lambda: [made(torch.optim.SGD, momentum=0.5)], 0.0),
    "Adam": (lambda: [made(torch.optim.Adam)], 0.0),
    "sparse Adam": (lambda: [made(torch.optim.SparseAdam)], 0.0),
    "RMSprop": (lambda: [made(torch.optim.RMSprop)], 0.0),
    "one of each": (lambda: [made(torch.optim.SGD), made(torch.optim.Adam)], 0.0),
    "momentum in one group": (
        lambda: [
            torch.optim.SGD(
                [{"params": [nn.Parameter(torch.zeros(2))], **more} for more in ({}, {"momentum": 0.5})], lr=0.1
            )
        ],
        0.0,
    ),
    "none": (list, 0.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_papers_momentum_is_for_sgd_without_any(kind):
    optimizers, expected = KINDS[kind]
    assert outer_momentum(optimizers())[0] == expected


class ScheduleFree(torch.optim.SGD):
    """Keeps averaged weights and exchanges them, as the optimizers of schedulefree do."""

    def train(self):
        pass

    def eval(self):
        pass


def test_an_optimizer_with_a_method_of_such_a_name_can_be_merged():
    class Logs(torch.optim.SGD):
        def train(self):
            pass

    assert unsupported_reason(made(Logs)) is None


def test_an_optimizer_that_averages_weights_itself_cannot_be_merged():
    assert "ScheduleFree keeps averages" in unsupported_reason(made(ScheduleFree))
    engine = ElasticEngine(ElasticConfig(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="ScheduleFree"):
        engine.attach(nn.Linear(1, 1), [made(ScheduleFree)])


def test_optimizers_need_a_model():
    with pytest.raises(RuntimeError, match="call attach"):
        ElasticEngine(ElasticConfig(), rank=0, world_size=1).follow(PLAIN())


def _moves(rank, kind, momentum):
    """Where the global model is after each of three merges; every replica moves by 1 in each mega-batch."""
    dist.init_process_group("gloo")
    model, told = nn.Linear(1, 1, bias=False), []
    nn.init.zeros_(model.weight)
    log = logging.getLogger("lightning_hetero")
    log.addFilter(lambda record: told.append(record.getMessage()) or True)
    log.setLevel("INFO")
    settings = {} if momentum is None else {"momentum": momentum}
    engine = ElasticEngine(ElasticConfig("elastic", mega_batch_size=4, settings=settings), rank=rank, world_size=2)
    engine.attach(model, KINDS[kind][0]())
    sampler, places = engine.shard(PermutationStream(12, shuffle=False, seed=0), batch_size=2), []
    for _ in sampler:
        engine.begin_batch()
        with torch.no_grad():
            model.weight.add_(1.0)
        engine.end_batch()
        places.append(model.weight.item())
    return places, [line for line in told if "momentum" in line]


@pytest.mark.parametrize(
    ("kind", "momentum", "expected"),
    [("plain", None, 0.9), ("Adam", None, 0.0), ("Adam", 0.5, 0.5), ("plain", 0.0, 0.0)],
)
def test_the_global_model_moves_by_the_chosen_momentum_and_rank_0_says_so(kind, momentum, expected):
    """w' = w + 1 + gamma (w - w_p)."""
    before = now = 0.0
    for place in (results := run_ranks(_moves, 2, kind, momentum))[0][0]:
        before, now = now, now + 1 + expected * (now - before)
        assert place == pytest.approx(now)
    said = [lines for _, lines in results]
    assert [len(lines) for lines in said] == [int(momentum is None), 0]
    assert all(f"momentum={expected:g}" in line for line in said[0])
