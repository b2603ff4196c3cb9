"""The engine with no trainer: a plain training loop of torch, as Fabric and Accelerate users can write it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.comm import PlanMismatchError
from lightning_hetero.core.merging.rules import MERGES, AdaptiveMerge
from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.data import PermutationStream
from lightning_hetero.elastic import ElasticConfig, ElasticEngine, Replica
from tests.helpers import Points, run_ranks


def _torch():
    dist.init_process_group("gloo")
    return lambda loader: loader, torch.Tensor.backward


def _fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return lambda loader: fabric.setup_dataloaders(loader, use_distributed_sampler=False), fabric.backward


def _accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return lambda loader: loader, accelerator.backward


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
    dist.barrier()
    return seen, model.weight.detach().numpy(), len(engine.merges)


def check_loop(merge, front_end):
    results = run_ranks(_loop, 2, merge, front_end)
    assert sorted(i for seen, *_ in results for i in seen) == sorted([*range(30)] * 2)
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] == 6


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_a_plain_training_loop(merge):
    check_loop(merge, _torch)


@pytest.mark.parametrize("front_end", [_fabric, _accelerate])
def test_a_loop_of_fabric_or_accelerate(front_end):
    """Their launch, loaders and backward; the model is not prepared, since that would average gradients."""
    check_loop("adaptive", front_end)


def _epoch(rank, config, epoch, weight=None, state=None):
    """Four mega-batches of one local update each, which add rank + 1: begins and ends of each, weights, the state."""
    engine, model = ElasticEngine(config, rank=rank, world_size=2), nn.Linear(1, 1, bias=False, dtype=torch.float64)
    if state is not None:
        engine.load_state_dict(state)
        nn.init.constant_(model.weight, weight)
    engine.attach(model)
    sampler, begins, ends = engine.shard(PermutationStream(16, shuffle=False, seed=0), batch_size=2), [], []
    sampler.set_epoch(epoch)
    for _ in sampler:
        engine.begin_batch()
        begins.append(model.weight.item())
        with torch.no_grad():
            model.weight.add_(rank + 1.0)
        engine.end_batch()
        ends.append(model.weight.item())
    return begins, ends, engine.merges[0].weights, engine.state_dict()


PAPERS = {"momentum": 0.9}


def _resume_with_another_rule(rank):
    dist.init_process_group("gloo")
    found = {}
    for before in MERGES:
        _, ends, _, state = _epoch(rank, ElasticConfig(before, mega_batch_size=4, settings=PAPERS), 0)
        for after in MERGES:
            resumed = _epoch(rank, ElasticConfig(after, mega_batch_size=4, settings=PAPERS), 1, ends[-1], state)
            found[before, after] = ends, *resumed[:3]
    dist.barrier()
    return found


def test_a_resume_with_another_rule_takes_over_what_both_use():
    """Replicas keep their distance from CROSSBOW to CROSSBOW only; momentum goes on where both rules have it."""
    first, second = run_ranks(_resume_with_another_rule, 2)
    for (before, after), (saved, begins, ends, weights) in first.items():
        assert ends == second[before, after][2]
        own = begins[0], second[before, after][1][0]
        assert (own == (saved[-1], saved[-1])) is not (before == after == "crossbow")
        merged = weights[0] * (own[0] + 1) + weights[1] * (own[1] + 2)
        if MERGES[before].momentum and MERGES[after].momentum:
            merged += 0.9 * (saved[-1] - saved[-2])
        assert ends[0] == pytest.approx(merged)


def _merge_twice(rank, merge, weights):
    dist.init_process_group("gloo")
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1.0)
    replica = Replica(model, MERGES[merge], momentum=0.5, world_size=2)
    replica.synchronize()
    history = []
    for _ in range(2):
        replica.resume()
        with torch.no_grad():
            model.weight.add_(rank + 1.0)  # what rank 0 and 1 learn
        own = model.weight[0, 0].item()
        replica.merge(weights[rank], share=0.5, diverged=False)
        history.append((own, model.weight[0, 0].item()))
    replica.resume()
    dist.barrier()
    return history, model.weight[0, 0].item()


@pytest.mark.parametrize("merge", sorted(MERGES))
def test_merges_are_the_printed_equations(merge):
    """Two merges by hand: ``w' = sum alpha_i w_i + gamma (w - w_p)``; CROSSBOW keeps half of a distance."""
    rule, weights = MERGES[merge], (0.25, 0.75) if merge == "adaptive" else (0.5, 0.5)
    results = run_ranks(_merge_twice, 2, merge, weights)
    model = previous = 1.0
    replicas = [1.0, 1.0]
    for turn in range(2):
        replicas = [replicas[0] + 1.0, replicas[1] + 2.0]
        merged = weights[0] * replicas[0] + weights[1] * replicas[1]
        merged += 0.5 * (model - previous) if rule.momentum else 0.0
        for rank, (history, _) in enumerate(results):
            assert history[turn] == (pytest.approx(replicas[rank]), pytest.approx(merged))
        pull = 0.5 if rule.elastic else 1.0
        replicas = [w - pull * (w - model) if rule.elastic else merged for w in replicas]
        previous, model = model, merged
    assert [last for _, last in results] == pytest.approx(replicas)


def _merge_buffers(rank, shares):
    dist.init_process_group("gloo")
    model = nn.BatchNorm1d(1)
    replica = Replica(model, MERGES["mean"], momentum=0.0, world_size=2)
    replica.synchronize()
    model.running_mean.fill_(rank + 1.0)
    model.num_batches_tracked.fill_(5 - rank)
    replica.merge(0.5, share=shares[rank], diverged=False)
    dist.barrier()
    return model.running_mean.item(), model.num_batches_tracked.item()


def test_running_statistics_are_means_and_counters_the_largest():
    assert run_ranks(_merge_buffers, 2, (0.25, 0.75)) == [(1.75, 5)] * 2


def _diverges(rank):
    dist.init_process_group("gloo")
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    replica = Replica(model, MERGES["crossbow"], momentum=0.0, world_size=2)
    replica.synchronize()
    nn.init.constant_(model.weight, 4.0 if rank == 0 else float("nan"))
    replica.merge(1.0 - rank, share=1.0 - rank, diverged=rank == 1)
    merged = model.weight.item()
    replica.resume()
    dist.barrier()
    return merged, model.weight.item()


def test_a_replica_of_crossbow_that_diverged_begins_anew_where_it_came_from():
    """Rank 0 keeps half of its distance; of rank 1's there is nothing to keep."""
    assert run_ranks(_diverges, 2) == [(4.0, 3.5), (4.0, 3.0)]


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
        seen += batch
        engine.end_batch()
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
    assert engine.steps_done() == len(sampler) == -(-samples // 4)


def test_data_for_fewer_batches_than_there_are_workers_are_refused():
    with pytest.raises(ValueError, match="1 samples .* cannot give each of 1 workers a batch"):
        alone(samples=1, least=2)


@pytest.mark.parametrize(
    ("merge", "before", "batch_size", "least", "after"),
    [
        ("adaptive", 6, 8, 1, 6),
        ("adaptive", 16, 8, 1, 8),  # the loader's batches are smaller now
        ("adaptive", 1, 8, 2, 2),  # there is a batch normalisation now
        ("adaptive", 1, 1, 2, 1),
        ("mean", 4, 8, 1, 8),  # a rule that scales no sizes
    ],
)
def test_batch_sizes_of_a_checkpoint_count_within_the_bounds_that_hold_now(merge, before, batch_size, least, after):
    engine, _ = alone(merge, {"batch_sizes": [before]}, batch_size=batch_size, least=least)
    assert engine.batch_sizes == (after,)
    assert engine.lr_factor == after / batch_size


def test_a_run_goes_on_where_it_was_saved_and_the_next_epoch_at_its_begin():
    engine, sampler = alone(state={"position": [0, 4]})
    assert epoch_of(engine, sampler) == list(range(4, 11))
    assert engine.state_dict()["position"] == [1, 0]
    assert epoch_of(engine, sampler, 1) == list(range(11))


def test_a_model_that_is_attached_later_takes_nothing_of_the_checkpoint():
    """As in another fit of the same run."""
    engine, _ = alone("crossbow", {"replicas": [{"weight": torch.ones(1, 1)}]})
    assert "weight" in engine.state_dict()["replicas"][0]
    engine.attach(nn.Linear(1, 1))
    assert engine.state_dict()["replicas"] == [{}]


def test_each_batch_waits_for_the_device_and_begins_with_a_replica_that_is_well():
    engine, sampler = alone()
    ends = []
    engine.pace = SimpleNamespace(end_batch=lambda: ends.append(engine.diverged))
    engine.diverged = True
    epoch_of(engine, sampler)
    assert ends == [False] * 3


def _perturbed(rank):
    """Weights that do not sum to 1, as perturbed ones may not."""
    dist.init_process_group("gloo")
    AdaptiveMerge.weights = lambda *given: SimpleNamespace(weights=(1.0, 3.0), perturbed=True)
    model, engine = nn.BatchNorm1d(1), ElasticEngine(ElasticConfig(mega_batch_size=4), rank=rank, world_size=2)
    engine.attach(model)
    for _ in engine.shard(PermutationStream(4, shuffle=False, seed=0), 2):
        engine.begin_batch()
        model.running_mean.fill_(rank + 1.0)
        engine.end_batch()
    dist.barrier()
    return model.running_mean.item()


def test_buffers_are_means_whatever_the_weights_sum_to():
    assert run_ranks(_perturbed, 2) == [1.75] * 2


def _differ(rank, how):
    dist.init_process_group("gloo")
    config = ElasticConfig("mean" if how == "settings" and rank else "elastic")
    engine = ElasticEngine(config, rank=rank, world_size=2)
    engine.shard(PermutationStream(300, shuffle=True, seed=rank if how == "data" else 0), batch_size=2)


@pytest.mark.parametrize("how", ["settings", "data"])
def test_ranks_that_differ_are_told(how):
    errors = run_ranks(_differ, 2, how, expect_errors=True)
    assert [kind for _, kind, _ in errors] == [PlanMismatchError.__name__] * 2


def test_a_batch_drawn_ahead_is_refused():
    engine = ElasticEngine(ElasticConfig(), rank=0, world_size=1)
    engine.attach(nn.Linear(1, 1))
    batches = iter(engine.shard(PermutationStream(300, shuffle=False, seed=0), batch_size=2))
    next(batches)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        next(batches)


def test_calls_out_of_order_are_refused():
    engine = ElasticEngine(ElasticConfig(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="no batch drawn"):
        engine.end_batch()
    with pytest.raises(RuntimeError, match="call attach"):
        engine.begin_batch()


def test_perturbation_moves_the_merged_model():
    """With weights that are perturbed the model is another one than without: the decision reaches the parameters."""
    settings = AdaptiveSettings(8, renormalize=False)
    found = MERGES["adaptive"].weights((8, 8), (3, 1), (0.01, 0.01), settings)
    plain = MERGES["adaptive"].weights((8, 8), (3, 1), (0.5, 0.5), settings)
    first, second = (run_ranks(_merge_twice, 2, "adaptive", w.weights)[0][0] for w in (found, plain))
    assert first[0][1] == pytest.approx(2 * 0.825 + 3 * 0.225)
    assert second[0][1] == pytest.approx(2 * 0.75 + 3 * 0.25)
