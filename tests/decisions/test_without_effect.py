"""Settings that do nothing are named once, with the reason: the rules as a table, and each front end."""

import lightning as L
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_hetero import (
    GNSCallback,
    LookAheadCallback,
    PerfModelCallback,
    TTACallback,
)
from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin
from lightning_hetero.callbacks._display.without_effect import callbacks_without_effect
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.planning.planner import PerfModelPlanner
from lightning_hetero.core.policies.proportional import ProportionalPlanner
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.frontend.without_effect import Run, without_effect
from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy as FabricStrategy
from tests.helpers import Points, Regressor, collected, fit
from tests.loops import FRONT_ENDS
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
        ({"hysteresis": 0.1, "replan": 5, "change_cost": 2.0, "probe_memory": True}, LEARNS, ""),
        ({"policy": "pid"}, ALONE, "policy"),
        ({"policy": "even"}, ALONE, ""),
        ({"local_batch_sizes": [16]}, {**ALONE, "batch_size": 16}, ""),
        ({"weight_fn": len, "staleness": 1}, ALONE, "weight_fn staleness"),
        ({"report": "runs"}, ALONE, "report"),
        (ADAPTS, ALONE, "max_total_batch_size lr_scaling noise_scale"),
        ({"max_total_batch_size": 64, "noise_scale": True}, LEFT, "max_total_batch_size noise_scale"),
        ({"hysteresis": 0.1, "change_cost": 2.0}, {"planner": ProportionalPlanner()}, "hysteresis change_cost"),
        ({"change_cost": 2.0, "hysteresis": 0.1, "staleness": 1}, {"planner": ProportionalPlanner()}, "change_cost"),
        ({"hysteresis": 0.1, "policy": "static"}, {"planner": StaticPlanner()}, "hysteresis"),
        ({"hysteresis": 0.1, "local_batch_sizes": [3, 1]}, {}, "hysteresis"),
        ({"hysteresis": 0.1, "staleness": 1, "policy": "even"}, {}, ""),
        ({"transfer_priority": True, "staleness": 1}, LEARNS, ""),
        ({"transfer_priority": True}, LEARNS, "transfer_priority"),
        ({"transfer_priority": True, "staleness": 1, "compression": "block_topk"}, LEARNS, "transfer_priority"),
        ({"local_batch_sizes": [3, 1]}, {"batch_size": 8}, "the"),  # DataLoader's batch_size
        ({"policy": "even", "max_local_batch_sizes": 8, "replan": 5}, LEFT, "max_local_batch_sizes replan"),
        ({"policy": "even", "report": "runs"}, LEFT, "report"),
        ({"probe_memory": True}, {**LEARNS, "on_cpu": True}, "probe_memory"),
        ({"on_nonfinite": "skip"}, {**LEARNS, "scaled": True}, "on_nonfinite"),
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
        ([OwnTTA()], TOPK, 2, []),
        ([PerfModelCallback()], {}, 1, ["PerfModelCallback"]),
        ([LookAheadCallback()], {}, 2, ["LookAheadCallback"]),
        ([TTACallback(min_density=0.1, min_steps=5)], TOPK, 2, ["TTACallback(min_steps"]),
        ([GNSCallback(method="mean")], {}, 1, ["GNSCallback(method"]),
        ([GNSCallback(), OwnGNS()], {}, 2, ["GNSCallback"]),
    ],
)
def test_callbacks(callbacks, settings, ranks, names):
    assert named(callbacks_without_effect(callbacks, HeteroConfig(**settings), ranks)) == names


# each front end


def _elastic(rank, settings, batch_size, *, world_size):
    from lightning_hetero import HeteroElasticStrategy

    fit(rank, HeteroElasticStrategy(**settings), world_size, batch_size)


def _said(rank, front_end, settings):
    lines = collected()
    {**FRONT_ENDS, "elastic": _elastic}[front_end](rank, settings, 4, world_size=2)
    return [line for line in lines if "no effect" in line]


@pytest.mark.parametrize(
    ("front_end", "settings", "says"),
    [
        ("lightning", {"hysteresis": 0.1, "policy": "static"}, "hysteresis=0.1"),
        ("fabric", {"hierarchy": [[0, 1]]}, "hierarchy=[[0, 1]]"),
        ("accelerate", {"hysteresis": 0.1, "policy": "pid"}, "hysteresis=0.1"),
        ("elastic", {"merge": "mean", "beta": 2.0}, "beta=2.0"),
    ],
)
def test_each_front_end_says_it_once_on_rank_0_and_nothing_of_defaults(front_end, settings, says):
    (line,), silent = run_ranks(_said, 2, front_end, settings)
    assert silent == []
    assert line.startswith(says)
    assert run_ranks(_said, 2, front_end, {}) == [[], []]


class Own(DistributedSampler):
    """An order of its own."""


def loaders(rank):
    """Loaders that split the data over ranks by themselves, and three that we could split."""
    data = Points(8)
    own = [DataLoader(data, 4, sampler=Own(data, 2, rank)) for _ in range(2)]
    return own + [DataLoader(data, 4, shuffle=True) for _ in range(3)]


def _left_by_accelerate(rank):
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(max_local_batch_sizes=8))
    optimizer = Regressor().configure_optimizers()
    for loader in loaders(rank):
        accelerator.prepare(loader, optimizer)
    accelerator.end_training()


def _left_by_fabric(rank):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(max_local_batch_sizes=8))
    fabric.launch()
    first, second, *others = loaders(rank)
    fabric.setup_dataloaders(first, second)
    fabric.setup_dataloaders(*others)
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
