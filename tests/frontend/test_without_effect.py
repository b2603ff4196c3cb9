"""Settings that do nothing are told once, with the reason: the tables of rules, and each front end."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import (
    DynamicBatchPIDCallback,
    GNSCallback,
    HeteroDDPStrategy,
    HeteroElasticStrategy,
    LookAheadCallback,
    PerfModelCallback,
    TTACallback,
)
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.callbacks._display.without_effect import callbacks_without_effect
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.policies.perf_model import PerfModelPlanner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.elastic import ElasticConfig
from lightning_hetero.elastic.without_effect import elastic_without_effect
from lightning_hetero.frontend.without_effect import Run, without_effect
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.helpers import Points, Regressor, collected, fit, run_ranks

ONE_WORKER = "there is one worker"
PAIRS = ((0,), (1,))


class OwnTTA(TTACallback):
    """Hands its arguments on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class OwnGNS(GNSCallback):
    """Measures the noise as well."""


@pytest.mark.parametrize(
    ("settings", "run", "expected"),
    [
        ({}, {"planner": PerfModelPlanner()}, []),
        ({"hysteresis": 0.1, "replan": 5}, {"planner": PerfModelPlanner()}, []),
        ({"policy": "pid"}, {"world_size": 1}, ["policy='pid' has no effect: " + ONE_WORKER]),
        ({"policy": "even"}, {"world_size": 1}, []),
        ({"local_batch_sizes": [16]}, {"world_size": 1, "batch_size": 16}, []),
        (
            {"weight_fn": len, "staleness": 1},
            {"world_size": 1},
            ["weight_fn, staleness=1 have no effect"],
        ),
        ({"compression": "fp16"}, {"world_size": 1}, ["compression=HalfPrecision(dtype='float16') has"]),
        ({"hierarchy": "nodes"}, {"world_size": 1}, ["hierarchy='nodes' has no effect: " + ONE_WORKER]),
        ({"balance_evaluation": True}, {"world_size": 1}, ["balance_evaluation=True has no effect: " + ONE_WORKER]),
        ({"max_total_batch_size": 64, "lr_scaling": "sqrt", "noise_scale": True}, {}, []),
        (
            {"max_total_batch_size": 64, "min_total_batch_size": 8, "lr_scaling": "sqrt", "noise_scale": True},
            {"world_size": 1},
            ["max_total_batch_size=64, min_total_batch_size=8, lr_scaling='sqrt', noise_scale=True have no effect"],
        ),
        (
            {"max_total_batch_size": 64, "noise_scale": True},
            {"split": False},
            ["max_total_batch_size=64, noise_scale=True have no effect: the training loader is left as it is"],
        ),
        (
            {"compression": "block_topk", "sparse_optimizer": True},
            {"world_size": 1},
            ["sparse_optimizer=True have no effect: " + ONE_WORKER],
        ),
        ({"hysteresis": 0.1, "change_cost": 2.0}, {"planner": PerfModelPlanner()}, []),
        (
            {"hysteresis": 0.1, "change_cost": 2.0},
            {"world_size": 1},
            ["hysteresis=0.1, change_cost=2.0 have no effect: " + ONE_WORKER],
        ),
        (
            {"hysteresis": 0.1, "change_cost": 2.0},
            {"planner": ProportionalPlanner()},
            ["hysteresis=0.1, change_cost=2.0 have no effect: proportional control"],
        ),
        (
            {"hysteresis": 0.1, "policy": "static"},
            {"planner": StaticPlanner()},
            ["policy='static' the split never"],
        ),
        ({"hysteresis": 0.1, "policy": "even"}, {}, ["with policy='even' the split never changes"]),
        ({"hysteresis": 0.1, "local_batch_sizes": [3, 1]}, {}, ["with local_batch_sizes=[3, 1] the split never"]),
        ({"hysteresis": 0.1, "staleness": 1, "policy": "even"}, {}, []),
        (
            {"hysteresis": 0.1, "change_cost": 2.0, "staleness": 1},
            {"planner": ProportionalPlanner()},
            ["change_cost=2.0 has no effect: proportional control"],
        ),
        ({"transfer_priority": True, "staleness": 1}, {"planner": PerfModelPlanner()}, []),
        (
            {"transfer_priority": True},
            {"planner": PerfModelPlanner()},
            ["transfer_priority=True has no effect: no grad"],
        ),
        (
            {"transfer_priority": True, "staleness": 1, "compression": "block_topk"},
            {"planner": PerfModelPlanner()},
            ["transfer_priority=True has no effect: a compressed gradient"],
        ),
        ({"local_batch_sizes": [3, 1]}, {"batch_size": 2}, []),
        (
            {"local_batch_sizes": [3, 1]},
            {"batch_size": 8},
            ["DataLoader's batch_size (8 per worker) has no effect"],
        ),
        ({"policy": "even"}, {"split": False}, []),
        (
            {"policy": "even", "max_local_batch_sizes": 8, "replan": 5},
            {"split": False},
            ["max_local_batch_sizes=8, replan=5 have no effect: the training loader is left as it is"],
        ),
        (
            {"policy": "even", "local_batch_multiple": 8},
            {"split": False},
            ["local_batch_multiple=8 has no effect"],
        ),
        ({"policy": "even", "report": "runs"}, {}, []),
        ({"policy": "even", "report": False}, {"split": False}, []),
        (
            {"policy": "even", "report": "runs"},
            {"split": False},
            ["report='runs' has no effect: the training loader is"],
        ),
        ({"report": "runs"}, {"world_size": 1}, ["report='runs' has no effect: " + ONE_WORKER]),
        ({"probe_memory": True}, {"planner": PerfModelPlanner()}, []),
        (
            {"probe_memory": True},
            {"planner": PerfModelPlanner(), "on_cpu": True},
            ["probe_memory=True has"],
        ),
        ({"on_nonfinite": "skip"}, {"planner": PerfModelPlanner()}, []),
        (
            {"on_nonfinite": "skip"},
            {"planner": PerfModelPlanner(), "scaled": True},
            ["on_nonfinite='skip' has"],
        ),
        ({"hierarchy": "nodes"}, {"planner": PerfModelPlanner(), "flat": False}, []),
        (
            {"hierarchy": [[0], [1]]},
            {"planner": PerfModelPlanner(), "clusters": PAIRS},
            ["hierarchy=[[0], [1]] has no effect: each worker is a cluster of its own"],
        ),
    ],
)
def test_settings(settings, run, expected):
    found = [str(one) for one in without_effect(HeteroConfig(**settings), Run(**{"world_size": 2, **run}))]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))


def test_only_what_loses_something_is_a_warning():
    bounds = HeteroConfig(policy="even", max_local_batch_sizes=8)
    assert [one.loses for one in without_effect(bounds, Run(2, split=False))] == [True]
    assert [one.loses for one in without_effect(HeteroConfig(policy="even", replan=8), Run(2, split=False))] == [False]


@pytest.mark.parametrize(
    ("callbacks", "settings", "world_size", "expected"),
    [
        ([PerfModelCallback(), GNSCallback()], {}, 2, []),
        ([LookAheadCallback()], {"staleness": 1}, 2, []),
        ([TTACallback(min_density=0.1)], {"compression": "block_topk"}, 2, []),
        ([TTACallback(512, hysteresis=0.1)], {"compression": "block_topk"}, 1, []),
        ([OwnTTA()], {"compression": "block_topk"}, 2, []),
        ([DynamicBatchPIDCallback(start="equal")], {}, 2, []),
        ([PerfModelCallback()], {}, 1, ["PerfModelCallback has no effect: " + ONE_WORKER]),
        ([LookAheadCallback()], {}, 2, ["LookAheadCallback has no effect: staleness=0 delays no gradient"]),
        ([LookAheadCallback()], {"staleness": 1}, 1, ["LookAheadCallback has no effect: " + ONE_WORKER]),
        (
            [TTACallback(lr_scaling="sqrt", min_steps=5, hysteresis=0.2)],
            {"compression": "block_topk"},
            2,
            ["TTACallback(lr_scaling='sqrt'), TTACallback(hysteresis=0.2), TTACallback(min_steps=5) have no effect"],
        ),
        (
            [DynamicBatchPIDCallback(start="equal")],
            {"policy": "pid", "local_batch_sizes": [3, 1]},
            2,
            ["DynamicBatchPIDCallback(start='equal') has no effect: training begins with local_batch_sizes=[3, 1]"],
        ),
        ([GNSCallback(method="mean")], {}, 1, ["GNSCallback(method='mean') has no effect"]),
        ([GNSCallback(), OwnGNS()], {}, 2, ["GNSCallback has no effect: gradients are given to one callback"]),
    ],
)
def test_callbacks(callbacks, settings, world_size, expected):
    found = [str(one) for one in callbacks_without_effect(callbacks, HeteroConfig(**settings), world_size)]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("merge", "settings", "expected"),
    [
        ("adaptive", {}, []),
        ("adaptive", {"beta": 1.0, "momentum": 0.5, "perturbation": 0.2}, []),
        ("mean", {"momentum": 0.0}, []),
        ("mean", {"momentum": 0.5}, ["momentum=0.5 has no effect: merge='mean' has none"]),
        (
            "elastic",
            {"min_batch_size": 2, "damped": False},
            ["min_batch_size=2, damped=False have no effect: merge"],
        ),
        (
            "crossbow",
            {"renormalize": False},
            ["renormalize=False has no effect: merge='crossbow' weights"],
        ),
        (
            "adaptive",
            {"perturbation": 0.0, "renormalize": False},
            ["renormalize=False has no effect: with perturbation=0"],
        ),
    ],
)
def test_elastic_settings(merge, settings, expected):
    found = [str(one) for one in elastic_without_effect(ElasticConfig(merge, settings=settings), 2, 640, 64)]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))


def test_elastic_settings_of_one_worker_and_of_mega_batches_longer_than_an_epoch():
    alone = elastic_without_effect(ElasticConfig(settings={"beta": 1.0, "momentum": 0.5}), 1, 640, 64)
    assert [one.settings for one in alone] == [("beta=1.0",)]
    longer = elastic_without_effect(ElasticConfig(mega_batch_size=700), 2, 640, 700)
    assert [str(one)[:43] for one in longer] == ["mega_batch_size=700 has no effect: an epoch"]
    assert elastic_without_effect(ElasticConfig(), 2, 640, 3200) == []


# each front end


def _lightning(rank, settings):
    fit(rank, HeteroDDPStrategy(**settings), 2, 4, dataset=Points(16))


def _elastic(rank, settings):
    fit(rank, HeteroElasticStrategy(**settings), 2, 4, dataset=Points(16))


def _fabric(rank, settings):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings))
    fabric.launch()
    model = Regressor()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    loader = fabric.setup_dataloaders(DataLoader(Points(16), 4, shuffle=True))
    for _ in range(2):
        for x, y, _ in loader:
            fabric.backward(nn.functional.mse_loss(wrapped(x), y))
            optimizer.step()
    fabric.strategy.teardown()


def _accelerate(rank, settings):
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings))
    model = Regressor()
    loader = DataLoader(Points(16), 4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, model.configure_optimizers(), loader)
    for _ in range(2):
        for x, y, _ in loader:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
    accelerator.end_training()


def _said(rank, train, settings):
    torch.manual_seed(0)
    lines = collected()
    train(rank, settings)
    return [line for line in lines if "no effect" in line]


@pytest.mark.parametrize(
    ("train", "settings", "expected"),
    [
        (_lightning, {"hysteresis": 0.1, "policy": "static"}, "hysteresis=0.1 has no effect: with policy='static'"),
        (_fabric, {"hierarchy": [[0, 1]]}, "hierarchy=[[0, 1]] has no effect: all workers are one cluster"),
        (_accelerate, {"hysteresis": 0.1, "policy": "pid"}, "hysteresis=0.1 has no effect: proportional control"),
        (_elastic, {"merge": "mean", "beta": 2.0}, "beta=2.0 has no effect: merge='mean' keeps batches equal"),
    ],
)
def test_each_front_end_says_it_once_on_rank_0(train, settings, expected):
    first, second = run_ranks(_said, 2, train, settings)
    assert (len(first), second) == (1, [])
    assert expected in first[0]


class Mine(torch.utils.data.BatchSampler):
    """Batches of its own."""


class Own(DistributedSampler):
    """An order of its own."""


def _left_by_accelerate(rank):
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(max_local_batch_sizes=8))
    optimizer = Regressor().configure_optimizers()
    given = {"batch_sampler": Mine(Own(Points(8), 2, rank), 4, False)}  # splits the data over ranks by itself
    for loader in (given, given, *({"batch_size": 4, "shuffle": True} for _ in range(3))):
        accelerator.prepare(DataLoader(Points(8), **loader), optimizer)
    accelerator.end_training()


def _left_by_fabric(rank):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(max_local_batch_sizes=8))
    fabric.launch()
    data = Points(8)
    fabric.setup_dataloaders(*(DataLoader(data, 4, sampler=Own(data, 2, rank)) for _ in range(2)))
    fabric.setup_dataloaders(*(DataLoader(data, 4, shuffle=True) for _ in range(3)))
    fabric.strategy.teardown()


def _left(rank, prepare):
    lines = collected()
    prepare(rank)
    return [line for line in lines if not line.startswith("plan ")]


@pytest.mark.parametrize("prepare", [_left_by_accelerate, _left_by_fabric])
def test_loaders_that_are_left_even_are_told_once_on_rank_0(prepare):
    lines, elsewhere = run_ranks(_left, 2, prepare)
    left, bounds, second = lines
    assert "It is" in left
    assert bounds.startswith("max_local_batch_sizes=8 has no effect: the training loader is left as it is")
    assert second.startswith("a second training loader is split evenly")
    assert elsewhere == []


@pytest.mark.parametrize("train", [_lightning, _fabric, _accelerate, _elastic])
def test_defaults_on_two_workers_say_nothing(train):
    assert run_ranks(_said, 2, train, {}) == [[], []]
