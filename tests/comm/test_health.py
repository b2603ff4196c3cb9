"""Losses, gradients and weights that went wrong: told once by name, left out, or an error, as the settings say."""

import logging

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero import BlockTopK
from tests.helpers import Points, Regressor, fit, run_ranks

N, STEPS, AT = 80, 10, 4


class Ill(Regressor):
    """On one rank the loss or only the gradient is not finite, in one batch or from it on."""

    def __init__(self, what, rank, at=AT, lasting=False):
        super().__init__()
        self.what, self.mine, self.at, self.lasting, self.batch = what, rank, at, lasting, -1
        self.net[0].weight.register_hook(self._spoil)

    @property
    def strikes(self):
        due = self.batch == self.at or (self.lasting and self.batch > self.at)
        return due and self.trainer.global_rank == self.mine

    def _spoil(self, gradient):
        return gradient * float(self.what[1]) if self.what[0] == "gradient" and self.strikes else gradient

    def training_step(self, batch, batch_idx):
        self.batch = batch_idx
        loss = super().training_step(batch, batch_idx)
        return loss * float(self.what[1]) if self.what[0] == "loss" and self.strikes else loss


def _train(rank, settings, what, at, callbacks, lasting):
    said = []
    logger = logging.getLogger("lightning_hetero")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    model = Ill(what, 1, at, lasting)
    try:
        result = fit(rank, settings, 2, 4, model=model, dataset=Points(N), max_epochs=1, callbacks=callbacks)
        error = None
    except RuntimeError as raised:
        result, error = None, (type(raised).__name__, str(raised))
    lines = [line for line in said if "finite" in line or "different weights" in line]
    return {"lines": lines, "error": error, "result": result, "weights": model.flat(), "seen": len(model.seen)}


def run(settings=None, what=("loss", "nan"), at=AT, callbacks=(), lasting=False):
    return run_ranks(_train, 2, {"replan": 3, **(settings or {})}, what, at, list(callbacks), lasting)


@pytest.mark.parametrize("settings", [{}, {"policy": "even"}, {"staleness": 1}, {"compression": "fp16"}], ids=str)
@pytest.mark.parametrize("what", [("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "inf")], ids=str)
def test_what_is_not_finite_is_told_once_with_rank_and_batch(settings, what):
    """The rank on which it begins sees it first; the others see it in their losses, once it is in the weights."""
    results = run(settings, what, lasting=True)
    for rank, result in enumerate(results):
        assert len(result["lines"]) == 1, result["lines"]
        assert f"rank {rank}: the loss is " in result["lines"][0]
    first = AT if what[0] == "loss" else AT + 1
    batches = (first, first + 1) if "staleness" in settings else (first,)
    assert any(f"in batch {batch} of epoch 0" in results[1]["lines"][0] for batch in batches)


def test_a_good_training_says_nothing():
    assert [result["lines"] for result in run(what=("loss", "1"))] == [[], []]


def test_weights_that_the_last_step_has_ruined_are_told():
    results = run(what=("gradient", "nan"), at=STEPS - 1)
    assert results[0]["lines"] == ["training has ended with weights that are not finite, after losses that all were"]
    assert np.isnan(results[0]["weights"]).any()


@pytest.mark.parametrize("settings", [{}, {"staleness": 1}, {"compression": "fp16"}], ids=str)
@pytest.mark.parametrize("what", [("loss", "nan"), ("gradient", "inf")], ids=str)
def test_dropped_gradients_reach_no_weight(settings, what):
    results = run({"nonfinite": "drop", **settings}, what)
    for result in results:
        assert result["seen"] == STEPS
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])
        batch = AT + (1 if "staleness" in settings else 0)
        left_out = [line for line in result["lines"] if "all ranks left that gradient out" in line]
        assert any(f"in step {b} of epoch 0" in line for line in left_out for b in (AT, batch))


@pytest.mark.parametrize("what", [("loss", "nan"), ("gradient", "inf")], ids=str)
@pytest.mark.parametrize(
    "settings", [{}, {"compression": BlockTopK(density=0.3, block=8, warmup_steps=2)}], ids=["plain", "block top-k"]
)
def test_stopping_is_an_error_on_all_ranks_that_names_rank_and_batch(settings, what):
    results = run({"nonfinite": "stop", **settings}, what)
    for result in results:
        kind, text = result["error"]
        assert kind == "NonFiniteError"
        assert f"in batch {AT} of epoch 0" in text
        assert ("the loss of rank 1 was not" if what[0] == "loss" else "the losses of all ranks were") in text
        assert result["seen"] == AT + 1
        assert np.isfinite(result["weights"]).all()
        np.testing.assert_array_equal(result["weights"], results[0]["weights"])


class Perturbs(L.Callback):
    """Changes the weights of a layer on one rank only."""

    def __init__(self, by):
        self.by = by

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == AT:
            with torch.no_grad():
                pl_module.net[2].weight.add_(self.by)


@pytest.mark.parametrize("settings", [{}, {"policy": "even"}, {"replan": "epoch"}], ids=str)
def test_ranks_with_different_weights_are_told_by_rank_and_parameter(settings):
    results = run(settings, ("loss", "1"), callbacks=[Perturbs(0.05)])
    assert len(results[0]["lines"]) == 1
    assert "ranks hold different weights" in results[0]["lines"][0]
    assert "of net.2.weight is" in results[0]["lines"][0]
    assert "on rank 1" in results[0]["lines"][0]
    assert results[1]["lines"] == []


def test_roundings_of_unequal_devices_are_not_told():
    assert [result["lines"] for result in run(what=("loss", "1"), callbacks=[Perturbs(1e-6)])] == [[], []]


def _fabric(rank, mode):
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(nonfinite=mode))
    fabric.launch()
    torch.manual_seed(1)
    model = nn.Linear(5, 1).double()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(Points(N), 4, shuffle=True))
    for step, (x, y, _) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss * (float("nan") if step == AT and rank == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_fabric_drops_and_stops_too():
    first, second = run_ranks(_fabric, 2, "drop")
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)
    errors = run_ranks(_fabric, 2, "stop", expect_errors=True)
    assert [kind for _, kind, _ in errors] == ["NonFiniteError"] * 2
