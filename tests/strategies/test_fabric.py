"""Fabric's own ways under ``hetero_ddp``; what all front ends promise is in ``tests/test_front_ends.py``."""

import io
import json
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points, run_ranks
from tests.loops import SAMPLES, every_sample_once, fabric_loop, flat, global_batches, network, replay
from tests.test_registration import run

EXACT = {"rtol": 1e-12, "atol": 1e-13}

DUMP_ALIASES = """
import json
from {namespace}.strategies import STRATEGY_REGISTRY as registry
def aliases(name):
    return {{key[len(name):]: entry["init_params"] for key, entry in registry.items() if key.startswith(name)}}
from {namespace} import Fabric
made = type(Fabric(strategy="hetero_ddp", accelerator="cpu", devices=1).strategy).__module__
print(json.dumps([aliases("ddp"), aliases("hetero_ddp"), made]))
"""


@pytest.mark.parametrize(
    ("namespace", "module"), [("lightning.fabric", "fabric_ddp"), ("lightning_fabric", "lightning_fabric_ddp")]
)
def test_aliases_are_those_of_ddp_with_no_import(namespace, module, tmp_path):
    ddp, hetero, made = json.loads(run(DUMP_ALIASES.format(namespace=namespace), tmp_path))
    assert len(hetero) == 5
    assert hetero == ddp
    assert made == f"lightning_hetero.strategies.{module}"


def test_fabric_run_offers_the_name(tmp_path):
    code = "from lightning.fabric.cli import _get_supported_strategies as f; print('hetero_ddp' in f())"
    assert run(code, tmp_path) == "True"


def ranks(fn, world_size=2, *args, **kwargs):
    return run_ranks(fn, world_size, *args, env={"OMP_NUM_THREADS": "1"}, **kwargs)


def _fabric(settings, world_size=2):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=HeteroDDPStrategy(**settings))
    fabric.launch()
    return fabric


def _loop(rank, settings, kwargs):
    return fabric_loop(rank, settings, 5, world_size=2, **kwargs)


def test_bf16_is_close():
    results = ranks(_loop, 2, {"local_batch_sizes": (7, 3)}, {"precision": "bf16-mixed"})
    np.testing.assert_allclose(results[0]["weights"], replay(results, schedule=0), rtol=0.05, atol=5e-3)


def _clipped(rank):
    fabric = _fabric({"local_batch_sizes": (7, 3), "replan": 5})
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Points(SAMPLES), 5, shuffle=True))
    seen, norms = [], []
    for epoch in range(2):
        for step, (x, y, index) in enumerate(loader):
            seen.append((epoch, step, index.tolist()))
            fabric.backward(nn.functional.mse_loss(model(x), y))
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.05)))
            optimizer.step()
            optimizer.zero_grad()
    result = {"seen": seen, "norms": norms, "weights": flat(model), "metrics": dict(fabric.strategy.metrics)}
    fabric.strategy.teardown()
    return result


def test_clipping_and_metrics():
    results = ranks(_clipped)
    assert results[0]["norms"] == results[1]["norms"]
    assert max(results[0]["norms"]) > 0.05
    for result in results:
        np.testing.assert_allclose(result["weights"], replay(results, schedule=0, clip=0.05), **EXACT)
        assert result["metrics"]["hetero/local_batch_size/rank0"] == 7


def _other_loaders(rank):
    fabric = _fabric({"local_batch_sizes": (7, 3), "balance_evaluation": True})
    train, second, evaluation = fabric.setup_dataloaders(
        *(DataLoader(Points(20), 5, shuffle=shuffle) for shuffle in (True, True, False))
    )
    model = fabric.setup(network())
    x, y, _ = next(iter(train))
    fabric.backward(nn.functional.mse_loss(model(x), y))
    weight = fabric.strategy.engine.scale_loss(torch.tensor(1.0)).item()
    sizes = [len(batch[2]) for batch in second]
    outside = fabric.strategy.engine.scale_loss(torch.tensor(1.0)).item()
    seen = [i for batch in evaluation for i in batch[2].tolist()]
    fabric.strategy.teardown()
    return weight, sizes, outside, seen


def test_other_loaders_are_even_or_balanced_and_weigh_one():
    results = ranks(_other_loaders)
    assert [weight for weight, *_ in results] == pytest.approx([1.4, 0.6])
    assert [sizes for _, sizes, *_ in results] == [[5, 5]] * 2
    assert [outside for *_, outside, _ in results] == [1.0, 1.0]
    assert [len(seen) for *_, seen in results] == [14, 6]
    assert sorted(i for *_, seen in results for i in seen) == list(range(20))


def _without_shuffling(rank):
    """A training loader that does not shuffle, with evaluations; then one that does, set up behind an evaluation's."""
    fabric, said = _fabric({"local_batch_sizes": (7, 3)}), io.StringIO()
    logging.getLogger("lightning_hetero").addHandler(logging.StreamHandler(said))
    train, evaluation = fabric.setup_dataloaders(DataLoader(Points(SAMPLES), 5), DataLoader(Points(20), 5))
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    with torch.no_grad():
        before = [len(x) for x, _, _ in train]
    model.eval()
    before += [len(x) for x, _, _ in train]
    model.train()
    seen, sizes, lengths = [], [], (len(train), len(evaluation))
    for epoch in range(2):
        for step, (x, y, index) in enumerate(train):
            seen.append((epoch, step, index.tolist()))
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        sizes.append([len(x) for x, _, _ in evaluation])
    first = {"seen": seen, "before": before, "sizes": sizes, "lengths": lengths, "weights": flat(model)}
    first["said"] = said.getvalue()
    fabric.strategy.teardown()

    fabric = _fabric({"policy": "even"})
    evaluation = fabric.setup_dataloaders(DataLoader(Points(20), 4))
    train = fabric.setup_dataloaders(DataLoader(Points(40), 5, shuffle=True))
    second = {
        "lengths": (len(evaluation), len(train)),
        "plans": len(fabric.strategy.plan_history),
        "passes": [(sum(len(x) for x, _, _ in one), fabric.strategy.session.position) for one in (evaluation, train)],
    }
    fabric.strategy.teardown()
    return first, second


def test_the_first_loader_is_the_training_loader_where_none_shuffles():
    results = ranks(_without_shuffling)
    first, second = [first for first, _ in results], results[0][1]
    every_sample_once(first)
    assert "the first loader is taken for the training loader and split by speed" in first[0]["said"]
    assert "a further loader that does not shuffle is taken for an evaluation's" in first[0]["said"]
    assert [sum(batch) for batch in global_batches(first)[:2]] == [45, 145]  # in order: 0 to 9, 10 to 19
    assert [[len(indices) for *_, indices in r["seen"][:7]] for r in first] == [[7] * 7, [3] * 7]
    for result in first:
        assert result["before"] == ([5] * 7 + [2]) * 2  # with gradients off, or in eval(): as plain DDP, 37 each
        assert result["sizes"] == [[5, 5]] * 2
        assert result["lengths"] == (8, 2)
        np.testing.assert_allclose(result["weights"], replay(first, schedule=0), **EXACT)
    assert second == {"lengths": (3, 4), "plans": 1, "passes": [(10, (0, 0)), (20, (1, 0))]}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def _refused(rank, what):
    settings = {"probe": {"probe_memory": True}, "batch norm": {"local_batch_sizes": (9, 1)}}
    fabric = _fabric(settings.get(what, {"policy": "pid"}))
    if what == "batch norm":
        fabric.setup_dataloaders(DataLoader(Points(20), 5, shuffle=True))
        return fabric.setup(nn.Sequential(network(), nn.BatchNorm1d(1)))
    if what == "direct backward":
        model = fabric.setup(network())
        x, y, _ = next(iter(fabric.setup_dataloaders(DataLoader(Points(20), 5, shuffle=True))))
        return nn.functional.mse_loss(model(x), y).backward()
    return fabric.setup_dataloaders(DataLoader(Stream(), None if what == "rows" else 2))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", "the rows of a batch of type int cannot be counted"),
        ("probe", "probe_memory=True tries out a LightningModule"),
        ("direct backward", "backward"),
        ("batch norm", "has a size below min_local_batch_size=2"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank(what, message):
    errors = ranks(_refused, 2, what, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(message in text for *_, text in errors)


def _by_hand(rank):
    """One step of a model, an optimizer and a loader that no environment was set up for."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="hetero_ddp")
    fabric._launched = True  # as Lightning's own tests pretend
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = network()
    fabric.strategy._set_world_ranks()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = fabric.setup_dataloaders(DataLoader(Points(16), 4, shuffle=True))
    x, y, _ = next(iter(loader))
    fabric.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    fabric.barrier()
    return flat(model), type(loader.batch_sampler).__name__, type(loader.sampler).__name__, fabric.strategy.plan


def test_what_is_set_up_before_the_processes_have_met_is_as_under_plain_ddp():
    first, second = ranks(_by_hand)
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1:] == second[1:] == ("BatchSampler", "DistributedSampler", None)


def test_the_fabric_strategy_says_that_it_is_plain_before_the_processes_have_met(caplog, monkeypatch):
    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    monkeypatch.setattr("lightning_hetero.frontend.log.log.propagate", True)
    loader = DataLoader(Points(16), 4)
    assert HeteroDDPStrategy().process_dataloader(loader) is loader
    assert caplog.text.count("before the processes have met") == 1
    assert "fabric.launch()" in caplog.text
