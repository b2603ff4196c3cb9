"""The elastic engine with no trainer: loops of one's own, what a merge makes of replicas, resumes, refusals."""

import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.comm import PlanMismatchError
from lightning_hetero.core.merging.rules import MERGES
from lightning_hetero.data import PermutationStream
from lightning_hetero.elastic import ElasticConfig, ElasticEngine, Replica
from tests.helpers import Points, collected
from tests.ranks import run_ranks

# loops of one's own


def leave(engine):
    """Wait for the others; end the thread that asks the job's store."""
    dist.barrier()
    engine.dispatcher.close()


def _torch():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return lambda loader: loader, torch.Tensor.backward


def _fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return lambda loader: fabric.setup_dataloaders(loader, use_distributed_sampler=False), fabric.backward


def _accelerate():
    from accelerate import Accelerator

    return lambda loader: loader, Accelerator(cpu=True).backward


def _loops(rank, merges, front_end):
    return [_loop(rank, merge, front_end) for merge in merges]


def _loop(rank, merge, front_end):
    loaded, backward = front_end()
    torch.manual_seed(rank)  # replicas differ until they are attached
    model, data, seen = nn.Linear(5, 1, dtype=torch.float64), Points(30), []
    engine = ElasticEngine(ElasticConfig(merge, mega_batch_size=12), rank=rank, world_size=2)
    engine.attach(model)
    sampler = engine.shard(PermutationStream(len(data), shuffle=True, seed=0), batch_size=3)
    loader = loaded(DataLoader(data, batch_sampler=sampler))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y, indices in loader:
            engine.begin_batch()
            optimizer.param_groups[0]["lr"] = 0.05 * engine.lr_factor
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            seen += indices.tolist()
            engine.end_batch()
    leave(engine)
    return seen, model.weight.detach().numpy(), engine.merges, engine.steps_done()


def check_loop(*merges, front_end=_torch):
    """Every sample once in each epoch, equal models, three merges in each epoch: of 12, 12 and 6 samples."""
    first, second = run_ranks(_loops, 2, merges, front_end)
    for (seen, weights, records, steps), (theirs, other, same, _) in zip(first, second, strict=True):
        assert sorted([*seen, *theirs]) == sorted([*range(30)] * 2)
        np.testing.assert_array_equal(weights, other)
        assert records == same
        assert [(one.epoch, one.position) for one in records] == [(e, p) for e in (0, 1) for p in (12, 24, 30)]
        assert [sum(one.samples) for one in records] == [12, 12, 6] * 2
        assert steps == 10


def test_a_plain_training_loop_with_every_rule():
    check_loop(*MERGES)


@pytest.mark.parametrize("front_end", [_fabric, _accelerate])
def test_a_loop_of_fabric_or_accelerate(front_end):
    """Their launch, loaders and backward; the model is not prepared, since that would average gradients."""
    check_loop("adaptive", front_end=front_end)


# epochs, and a run that goes on


def alone(merge="adaptive", state=None, samples=11, batch_size=4, **more):
    """An engine with nobody else, and its sampler."""
    engine = ElasticEngine(ElasticConfig(merge, mega_batch_size=max(batch_size, 4)), rank=0, world_size=1)
    if state is not None:
        engine.load_state_dict({"position": [0, 0], "batch_sizes": [4], "previous": {}, "replicas": [{}], **state})
    engine.attach(nn.Linear(1, 1))
    return engine, engine.shard(PermutationStream(samples, shuffle=False, seed=0), batch_size, **more)


def epoch_of(engine, sampler, epoch=0):
    """Samples that an epoch goes through."""
    sampler.set_epoch(epoch)
    seen = []
    for batch in sampler:
        engine.begin_batch()
        assert not engine.diverged
        seen += batch
        engine.end_batch()
    assert engine.epoch_over
    return seen


@pytest.mark.parametrize(
    ("more", "samples"),
    [({}, 11), ({"drop_last": True}, 8), ({"limit": 2}, 8), ({"limit": 5}, 11), ({"limit": 0.5}, 4)],
    ids=str,
)
def test_an_epoch_has_as_many_samples_as_it_is_told(more, samples):
    engine, sampler = alone(**more)
    assert epoch_of(engine, sampler) == list(range(samples))
    assert engine.epoch_samples == samples
    assert engine.steps_done() == engine.steps_per_epoch == len(sampler) == -(-samples // 4)
    assert epoch_of(engine, sampler, 1) == list(range(samples))
    assert engine.steps_done() == 2 * engine.steps_per_epoch


@pytest.mark.parametrize(
    ("merge", "before", "batch_size", "least", "after"),
    [
        ("adaptive", [6], 8, 1, 6),
        ("adaptive", [16], 8, 1, 8),  # the loader's batches are smaller now
        ("adaptive", [1], 8, 2, 2),  # there is a batch normalisation now
        ("adaptive", [1], 1, 2, 1),
        ("adaptive", [5, 6], 8, 1, 8),  # there were other ranks
        ("mean", [4], 8, 1, 8),  # a rule that scales no sizes
    ],
)
def test_batch_sizes_of_a_checkpoint_count_within_the_bounds_that_hold_now(merge, before, batch_size, least, after):
    state = {"batch_sizes": before, "replicas": [{} for _ in before]}
    engine, _ = alone(merge, state, batch_size=batch_size, least=least)
    assert engine.batch_sizes == (after,)
    assert engine.lr_factor == after / batch_size


def test_a_run_goes_on_where_it_was_saved_and_the_next_epoch_at_its_begin():
    engine, sampler = alone(state={"position": [0, 4]})
    assert engine.position == (0, 4)
    assert epoch_of(engine, sampler) == list(range(4, 11))
    assert engine.state_dict()["position"] == [1, 0]
    assert epoch_of(engine, sampler, 1) == list(range(11))


# what a merge makes of replicas


def replica_of(model, merge, momentum=0.0):
    replica = Replica(model, MERGES[merge], momentum=momentum, world_size=2)
    replica.synchronize()
    return replica


def _merge_twice(rank, merge, weights):
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight) if rank == 0 else None
    replica, history = replica_of(model, merge, momentum=0.5), []
    for _ in range(2):
        replica.resume()
        with torch.no_grad():
            model.weight.add_(rank + 1.0)  # what rank 0 and 1 learn
        own = model.weight[0, 0].item()
        replica.merge(weights[rank], share=0.5, diverged=False)
        history.append((own, model.weight[0, 0].item()))
    replica.resume()
    return history, model.weight[0, 0].item()


def _buffers(rank):
    """Statistics by shares that sum to 1, the largest count; a frozen tensor is averaged only if ranks differ in it."""
    model = nn.BatchNorm1d(1)
    model.frozen, model.teacher = (nn.Parameter(torch.full((2,), 0.1), requires_grad=False) for _ in range(2))
    replica = replica_of(model, "mean")
    model.running_mean.fill_(rank + 1.0)
    model.num_batches_tracked.fill_(5 - rank)
    model.teacher.data.fill_(rank + 1.0)
    replica.merge(0.5, share=(0.25, 0.75)[rank], diverged=False)
    means = model.running_mean.item(), model.num_batches_tracked.item(), model.teacher.tolist()
    return *means, torch.equal(model.frozen, torch.full((2,), 0.1))


def _merges(rank):
    dist.init_process_group("gloo")
    found = {"buffers": _buffers(rank)}
    for merge in MERGES:
        found[merge] = _merge_twice(rank, merge, (0.25, 0.75) if MERGES[merge].scales else (0.5, 0.5))
    dist.barrier()
    return found


def test_merges_are_the_printed_equations():
    """Two merges by hand: ``w' = sum alpha_i w_i + gamma (w - w_p)``; CROSSBOW keeps half of a distance."""
    results = run_ranks(_merges, 2)
    for merge, rule in MERGES.items():
        weights = (0.25, 0.75) if rule.scales else (0.5, 0.5)
        model = previous = 1.0
        replicas = [1.0, 1.0]
        for turn in range(2):
            replicas = [replicas[0] + 1.0, replicas[1] + 2.0]
            merged = weights[0] * replicas[0] + weights[1] * replicas[1]
            merged += 0.5 * (model - previous) if rule.momentum else 0.0
            for rank, found in enumerate(results):
                assert found[merge][0][turn] == pytest.approx((replicas[rank], merged)), merge
            replicas = [w - 0.5 * (w - model) if rule.elastic else merged for w in replicas]
            previous, model = model, merged
        assert [found[merge][1] for found in results] == pytest.approx(replicas)
    assert [found["buffers"] for found in results] == [(1.75, 5, [1.75, 1.75], True)] * 2


# the momentum of the global model


def sgd(**arguments):
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, **arguments)


class ScheduleFree(torch.optim.SGD):
    """Keeps averaged weights and exchanges them, as the optimizers of schedulefree do."""

    def train(self):
        pass

    def eval(self):
        pass


ONE_GROUP = [{"params": [nn.Parameter(torch.zeros(2))], **group} for group in ({}, {"momentum": 0.5})]
MOMENTA = [  # optimizers, the momentum that is given, the one that is taken
    (sgd(), None, 0.9),
    (sgd(), 0.0, 0.0),
    (torch.optim.SGD(ONE_GROUP, lr=0.1), None, 0.0),
    (torch.optim.Adam([nn.Parameter(torch.zeros(2))]), None, 0.0),
    (torch.optim.Adam([nn.Parameter(torch.zeros(2))]), 0.5, 0.5),
]


def _moves(rank):
    """Where the global model is after each of three merges; every replica moves by 1 in each mega-batch."""
    dist.init_process_group("gloo")
    logging.getLogger("lightning_hetero").setLevel("INFO")
    found = []
    for optimizer, momentum, _ in MOMENTA:
        model, places, told = nn.Linear(1, 1, bias=False), [], collected()
        nn.init.zeros_(model.weight)
        settings = {} if momentum is None else {"momentum": momentum}
        engine = ElasticEngine(ElasticConfig("elastic", mega_batch_size=4, settings=settings), rank=rank, world_size=2)
        engine.attach(model, [optimizer])
        for _ in engine.shard(PermutationStream(12, shuffle=False, seed=0), batch_size=2):
            engine.begin_batch()
            with torch.no_grad():
                model.weight.add_(1.0)
            engine.end_batch()
            places.append(model.weight.item())
        found.append((places, [line for line in told if "momentum" in line]))
        leave(engine)
    return found


def test_the_papers_momentum_is_for_sgd_without_any_and_rank_0_says_so():
    """w' = w + 1 + gamma (w - w_p)."""
    first, second = run_ranks(_moves, 2)
    for (_, given, expected), (places, said), (_, nothing) in zip(MOMENTA, first, second, strict=True):
        before = now = 0.0
        for place in places:
            before, now = now, now + 1 + expected * (now - before)
            assert place == pytest.approx(now)
        assert [len(said), len(nothing)] == [int(given is None), 0]
        assert all(f"momentum={expected:g}" in line for line in said)


# refusals


DIFFER = {  # what rank 1 has, and what each rank is told
    "shape": "weight [2, 3]",
    "settings": "settings",
    "data": "data",
    "momentum": "momentum",
}


def _differ(rank):
    dist.init_process_group("gloo")
    found = {}
    for what in DIFFER:
        odd = rank == 1
        try:
            config = ElasticConfig("mean" if what == "settings" and odd else "elastic", mega_batch_size=16)
            engine = ElasticEngine(config, rank=rank, world_size=2)
            model = nn.Linear(3, 2 if what == "shape" and odd else 4)
            engine.attach(model, [sgd(momentum=0.5 * (what == "momentum" and odd))])
            stream = PermutationStream(300, shuffle=True, seed=int(what == "data" and odd))
            engine.shard(stream, batch_size=2)
            leave(engine)
        except PlanMismatchError as error:
            found[what] = str(error)
            if what != "settings":  # else there is no engine
                leave(engine)
    torch.manual_seed(rank)
    engine, model = ElasticEngine(ElasticConfig(), rank=rank, world_size=2), nn.Linear(3, 4)
    engine.attach(model)
    leave(engine)
    return found, [p.tolist() for p in model.parameters()]


def test_ranks_that_differ_are_told_in_what_and_values_are_rank_0s():
    (first, model), (second, other) = run_ranks(_differ, 2)
    assert {what: DIFFER[what] in text for what, text in first.items()} == dict.fromkeys(DIFFER, True)
    assert first == second
    torch.manual_seed(0)
    assert model == other == [p.tolist() for p in nn.Linear(3, 4).parameters()]


def test_calls_out_of_order_and_what_cannot_be_merged_are_refused():
    engine = ElasticEngine(ElasticConfig(), rank=0, world_size=1)
    for call, says in (
        (engine.end_batch, "no batch"),
        (engine.begin_batch, "attach"),
        (lambda: engine.follow([sgd()]), "attach"),
        (lambda: engine.epoch_samples, "shard"),
    ):
        with pytest.raises(RuntimeError, match=says):
            call()
    with pytest.raises(ValueError, match="ScheduleFree"):
        engine.attach(nn.Linear(1, 1), [ScheduleFree([nn.Parameter(torch.zeros(2))], lr=0.1)])
    batches = iter(engine.shard(PermutationStream(300, shuffle=False, seed=0), batch_size=2))
    next(batches)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        next(batches)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: alone(samples=1, least=2), "1 samples"),
        (lambda: alone(samples=3, drop_last=True), "3 samples"),
        (lambda: ElasticConfig("median"), "merge='median'"),
        (lambda: ElasticConfig(mega_batch_size=8, mega_batch_batches=2), "mega_batch_batches=2"),
        (lambda: ElasticConfig(mega_batch_size=0), "mega_batch_size=0"),
        (lambda: ElasticConfig(mega_batch_batches=2).samples(4, 3), "mega_batch_batches=2"),
    ],
)
def test_what_is_out_of_range_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
