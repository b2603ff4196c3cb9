"""Settings that do nothing are named once, with the reason: the rules as a table, and each front end."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import (
    DynamicBatchPIDCallback,
    GNSCallback,
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
from tests.helpers import Points, Regressor, collected, fit
from tests.ranks import run_ranks

ALONE, LEFT = {"world_size": 1}, {"split": False}
LEARNS = {"planner": PerfModelPlanner()}
ADAPTS = {"max_total_batch_size": 64, "lr_scaling": "sqrt", "noise_scale": True}


def named(found):
    """Names of the settings of all notes, in order."""
    return [one.partition("=")[0] for note in found for one in note.settings]


@pytest.mark.parametrize(
    ("settings", "run", "names"),
    [
        ({}, LEARNS, ""),
        ({"hysteresis": 0.1, "replan": 5, "change_cost": 2.0}, LEARNS, ""),
        ({"policy": "pid"}, ALONE, "policy"),
        ({"policy": "even"}, ALONE, ""),
        ({"local_batch_sizes": [16]}, {**ALONE, "batch_size": 16}, ""),
        ({"weight_fn": len, "staleness": 1}, ALONE, "weight_fn staleness"),
        ({"compression": "fp16"}, ALONE, "compression"),
        ({"hierarchy": "nodes"}, ALONE, "hierarchy"),
        ({"balance_evaluation": True}, ALONE, "balance_evaluation"),
        ({"report": "runs"}, ALONE, "report"),
        ({"hysteresis": 0.1, "change_cost": 2.0}, ALONE, "hysteresis change_cost"),
        ({"compression": "block_topk", "sparse_optimizer": True}, ALONE, "compression sparse_optimizer"),
        (ADAPTS, {}, ""),
        (
            {**ADAPTS, "min_total_batch_size": 8},
            ALONE,
            "max_total_batch_size min_total_batch_size lr_scaling noise_scale",
        ),
        ({"max_total_batch_size": 64, "noise_scale": True}, LEFT, "max_total_batch_size noise_scale"),
        ({"hysteresis": 0.1, "change_cost": 2.0}, {"planner": ProportionalPlanner()}, "hysteresis change_cost"),
        ({"change_cost": 2.0, "hysteresis": 0.1, "staleness": 1}, {"planner": ProportionalPlanner()}, "change_cost"),
        ({"hysteresis": 0.1, "policy": "static"}, {"planner": StaticPlanner()}, "hysteresis"),
        ({"hysteresis": 0.1, "policy": "even"}, {}, "hysteresis"),
        ({"hysteresis": 0.1, "local_batch_sizes": [3, 1]}, {}, "hysteresis"),
        ({"hysteresis": 0.1, "staleness": 1, "policy": "even"}, {}, ""),
        ({"transfer_priority": True, "staleness": 1}, LEARNS, ""),
        ({"transfer_priority": True}, LEARNS, "transfer_priority"),
        ({"transfer_priority": True, "staleness": 1, "compression": "block_topk"}, LEARNS, "transfer_priority"),
        ({"local_batch_sizes": [3, 1]}, {"batch_size": 2}, ""),
        ({"local_batch_sizes": [3, 1]}, {"batch_size": 8}, "the"),  # DataLoader's batch_size
        ({"policy": "even"}, LEFT, ""),
        ({"policy": "even", "max_local_batch_sizes": 8, "replan": 5}, LEFT, "max_local_batch_sizes replan"),
        ({"policy": "even", "local_batch_multiple": 8}, LEFT, "local_batch_multiple"),
        ({"policy": "even", "report": "runs"}, {}, ""),
        ({"policy": "even", "report": False}, LEFT, ""),
        ({"policy": "even", "report": "runs"}, LEFT, "report"),
        ({"probe_memory": True}, LEARNS, ""),
        ({"probe_memory": True}, {**LEARNS, "on_cpu": True}, "probe_memory"),
        ({"on_nonfinite": "skip"}, LEARNS, ""),
        ({"on_nonfinite": "skip"}, {**LEARNS, "scaled": True}, "on_nonfinite"),
        ({"hierarchy": "nodes"}, {**LEARNS, "flat": False}, ""),
        ({"hierarchy": [[0], [1]]}, {**LEARNS, "clusters": ((0,), (1,))}, "hierarchy"),
    ],
    ids=str,
)
def test_settings(settings, run, names):
    found = without_effect(HeteroConfig(**settings), Run(**{"world_size": 2, **run}))
    assert [name.split()[0] for name in named(found)] == names.split()


def test_only_what_loses_something_is_a_warning():
    for settings, loses in (({"max_local_batch_sizes": 8}, True), ({"replan": 8}, False)):
        found = without_effect(HeteroConfig(policy="even", **settings), Run(2, split=False))
        assert [one.loses for one in found] == [loses]


class OwnTTA(TTACallback):
    """Hands its arguments on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class OwnGNS(GNSCallback):
    """Measures the noise as well."""


TOPK = {"compression": "block_topk"}


@pytest.mark.parametrize(
    ("callbacks", "settings", "ranks", "names"),
    [
        ([PerfModelCallback(), GNSCallback()], {}, 2, []),
        ([LookAheadCallback()], {"staleness": 1}, 2, []),
        ([TTACallback(min_density=0.1)], TOPK, 2, []),
        ([TTACallback(512, hysteresis=0.1)], TOPK, 1, []),
        ([OwnTTA()], TOPK, 2, []),
        ([DynamicBatchPIDCallback(start="equal")], {}, 2, []),
        ([PerfModelCallback()], {}, 1, ["PerfModelCallback"]),
        ([LookAheadCallback()], {}, 2, ["LookAheadCallback"]),
        ([LookAheadCallback()], {"staleness": 1}, 1, ["LookAheadCallback"]),
        (
            [TTACallback(lr_scaling="sqrt", min_steps=5, hysteresis=0.2)],
            TOPK,
            2,
            ["TTACallback(lr_scaling", "TTACallback(hysteresis", "TTACallback(min_steps"],
        ),
        (
            [DynamicBatchPIDCallback(start="equal")],
            {"policy": "pid", "local_batch_sizes": [3, 1]},
            2,
            ["DynamicBatchPIDCallback(start"],
        ),
        ([GNSCallback(method="mean")], {}, 1, ["GNSCallback(method"]),
        ([GNSCallback(), OwnGNS()], {}, 2, ["GNSCallback"]),
    ],
)
def test_callbacks(callbacks, settings, ranks, names):
    assert named(callbacks_without_effect(callbacks, HeteroConfig(**settings), ranks)) == names


@pytest.mark.parametrize(
    ("merge", "settings", "run", "names"),
    [
        ("adaptive", {}, (2, 640, 64), ""),
        ("adaptive", {"beta": 1.0, "momentum": 0.5, "perturbation": 0.2}, (2, 640, 64), ""),
        ("mean", {"momentum": 0.0}, (2, 640, 64), ""),
        ("mean", {"momentum": 0.5}, (2, 640, 64), "momentum"),
        ("elastic", {"min_batch_size": 2, "damped": False}, (2, 640, 64), "min_batch_size damped"),
        ("crossbow", {"renormalize": False}, (2, 640, 64), "renormalize"),
        ("adaptive", {"perturbation": 0.0, "renormalize": False}, (2, 640, 64), "renormalize"),
        ("adaptive", {"beta": 1.0, "momentum": 0.5}, (1, 640, 64), "beta"),
        ("adaptive", {"mega_batch_size": 700}, (2, 640, 700), "mega_batch_size"),
        ("adaptive", {}, (2, 640, 3200), ""),
    ],
)
def test_elastic_settings(merge, settings, run, names):
    mega = {name: value for name, value in settings.items() if name == "mega_batch_size"}
    rest = {name: value for name, value in settings.items() if name not in mega}
    assert named(elastic_without_effect(ElasticConfig(merge, **mega, settings=rest), *run)) == names.split()


# each front end


def _lightning(rank, settings):
    fit(rank, settings, 2, 4, dataset=Points(16))


def _elastic(rank, settings):
    from lightning_hetero import HeteroElasticStrategy

    fit(rank, HeteroElasticStrategy(**settings), 2, 4, dataset=Points(16))


def _fabric(rank, settings):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(**settings))
    fabric.launch()
    model = Regressor()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    loader = fabric.setup_dataloaders(DataLoader(Points(16), 4, shuffle=True))
    for x, y, _ in [*loader, *loader]:
        fabric.backward(nn.functional.mse_loss(wrapped(x), y))
        optimizer.step()
    fabric.strategy.teardown()


def _accelerate(rank, settings):
    accelerator, model = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**settings)), Regressor()
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
    ("train", "settings", "says"),
    [
        (_lightning, {"hysteresis": 0.1, "policy": "static"}, "hysteresis=0.1"),
        (_fabric, {"hierarchy": [[0, 1]]}, "hierarchy=[[0, 1]]"),
        (_accelerate, {"hysteresis": 0.1, "policy": "pid"}, "hysteresis=0.1"),
        (_elastic, {"merge": "mean", "beta": 2.0}, "beta=2.0"),
    ],
)
def test_each_front_end_says_it_once_on_rank_0_and_nothing_of_defaults(train, settings, says):
    (line,), silent = run_ranks(_said, 2, train, settings)
    assert silent == []
    assert line.startswith(says)
    assert run_ranks(_said, 2, train, {}) == [[], []]


def _looks(rank, callback, settings):
    lines = collected()
    fit(rank, settings, 2, 5, callbacks=[callback], dataset=Points(10), max_epochs=1)
    return [line for line in lines if "LookAheadCallback" in line]


def test_that_nothing_is_delayed_is_said_only_where_it_is_so():
    """A controller of the time to accuracy brings the callback by itself."""
    (line,), silent = run_ranks(_looks, 2, LookAheadCallback(), {})
    assert silent == []
    assert "staleness=0" in line
    assert run_ranks(_looks, 2, LookAheadCallback(), {"staleness": 1}) == [[], []]
    assert run_ranks(_looks, 2, TTACallback(), TOPK) == [[], []]


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
    (left, bounds, second), silent = run_ranks(_left, 2, prepare)
    assert "splits" in left or "distributed sampler" in left
    assert bounds.startswith("max_local_batch_sizes=8")
    assert second.startswith("a second training loader")
    assert silent == []
