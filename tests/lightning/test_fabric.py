"""Fabric's own ways under ``hetero_ddp``; what all front ends promise is told where they are."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points, collected
from tests.loops import SAMPLES, every_sample_once, flat, network, replay
from tests.ranks import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-13}
SPLIT = {"local_batch_sizes": (7, 3)}


def launched(settings):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(**settings))
    fabric.launch()
    return fabric


def prepared(fabric):
    model = network()
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def _other_loaders(rank):
    fabric = launched({**SPLIT, "balance_evaluation": True})
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
    results = run_ranks(_other_loaders, 2)
    assert [weight for weight, *_ in results] == pytest.approx([1.4, 0.6])
    assert [sizes for _, sizes, *_ in results] == [[5, 5]] * 2
    assert [outside for *_, outside, _ in results] == [1.0, 1.0]
    assert [len(seen) for *_, seen in results] == [14, 6]
    assert sorted(i for *_, seen in results for i in seen) == list(range(20))


def _without_shuffling(rank):
    """A training loader that does not shuffle, with evaluations."""
    fabric, lines = launched({**SPLIT, "replan": 5}), collected()
    train, evaluation = fabric.setup_dataloaders(DataLoader(Points(SAMPLES), 5), DataLoader(Points(20), 5))
    model, optimizer = prepared(fabric)
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
    found = {"seen": seen, "before": before, "sizes": sizes, "lengths": lengths, "weights": flat(model)}
    found |= {"said": "\n".join(lines), "metrics": dict(fabric.strategy.metrics)}
    fabric.strategy.teardown()
    return found


def test_the_first_loader_is_the_training_loader_where_none_shuffles():
    results = run_ranks(_without_shuffling, 2)
    every_sample_once(results)
    assert len(results[0]["said"].splitlines()) >= 2, "which loader is taken for what"
    assert [[len(indices) for *_, indices in r["seen"][:7]] for r in results] == [[7] * 7, [3] * 7]
    for result in results:
        assert result["before"] == ([5] * 7 + [2]) * 2  # with gradients off, or in eval(): as plain DDP, 37 each
        assert result["sizes"] == [[5, 5]] * 2
        assert result["metrics"]["hetero/local_batch_size/rank0"] == 7
        assert result["lengths"] == (8, 2)
        np.testing.assert_allclose(result["weights"], replay(results, schedule=0), **EXACT)


def _direct(fabric):
    model = fabric.setup(network())
    x, y, _ = next(iter(fabric.setup_dataloaders(DataLoader(Points(20), 5, shuffle=True))))
    nn.functional.mse_loss(model(x), y).backward()


def _normalised(fabric):
    fabric.setup_dataloaders(DataLoader(Points(20), 5, shuffle=True))
    fabric.setup(nn.Sequential(network(), nn.BatchNorm1d(1)))


REFUSED = {
    "probe": ({"probe_memory": True}, _direct, "probe_memory"),
    "direct backward": ({"policy": "pid"}, _direct, "backward"),
    "batch norm": ({"local_batch_sizes": (9, 1)}, _normalised, "min_local_batch_size=2"),
}


def _refused(rank, name):
    settings, act, _ = REFUSED[name]
    act(launched(settings))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_on_every_rank(name):
    errors = run_ranks(_refused, 2, name, expect_errors=True)
    assert [rank for rank, *_ in errors] == [0, 1]
    assert all(REFUSED[name][2] in text for *_, text in errors)
