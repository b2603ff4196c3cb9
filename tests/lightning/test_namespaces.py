"""The standalone packages ``pytorch_lightning`` and ``lightning_fabric``: one training of each strategy."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points
from tests.loops import flat, network, whole
from tests.ranks import run_ranks

pl = pytest.importorskip("pytorch_lightning")
N = 42  # four batches of ten and a ragged one of two


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = network(), []

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        engine = getattr(self.trainer.strategy, "engine", None)
        self.seen += [] if getattr(engine, "own_size", None) == 0 else indices.tolist()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def _fit(rank, strategy, ranks, batch_size):
    trainer, model = pl.Trainer(strategy=strategy, accelerator="cpu", devices=ranks, max_epochs=2, **QUIET), Module()
    trainer.fit(model, DataLoader(Points(N), batch_size, shuffle=True))
    return {
        "strategy": type(trainer.strategy).__module__,
        "weights": torch.cat([whole(p).detach().flatten() for p in model.parameters()]).numpy(),
        "seen": model.seen,
        "train": float(trainer.callback_metrics["train"]),
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "elastic"])
@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_a_training_by_name_is_that_of_one_process(kind):
    results = run_ranks(_fit, 2, f"hetero_{kind}", 2, 5)
    (alone,) = run_ranks(_fit, 1, "ddp", 1, 10)
    assert {r["strategy"] for r in results} == {f"lightning_hetero.strategies.pytorch_lightning_{kind}"}
    assert sorted(i for r in results for i in r["seen"]) == sorted(alone["seen"])
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    if kind != "elastic":
        np.testing.assert_allclose(results[0]["weights"], alone["weights"], rtol=1e-12)
        assert results[0]["train"] == pytest.approx(alone["train"], rel=1e-5)


def _fabric(rank):
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=2, strategy="hetero_ddp")
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    seen = []
    for x, y, index in fabric.setup_dataloaders(DataLoader(Points(N), 5, shuffle=True)):
        seen += index[: fabric.strategy.engine.own_size].tolist()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    module = type(fabric.strategy).__module__
    fabric.strategy.teardown()
    return module, flat(model), seen


def test_a_training_of_fabric_takes_each_sample_once():
    (module, weights, seen), (_, others, more) = run_ranks(_fabric, 2)
    assert module == "lightning_hetero.strategies.lightning_fabric_ddp"
    assert sorted(seen + more) == list(range(N))
    np.testing.assert_array_equal(weights, others)
