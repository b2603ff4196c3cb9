"""The standalone packages ``pytorch_lightning`` and ``lightning_fabric``: one training of each strategy."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points
from tests.loops import flat, network
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


def whole(parameter):
    """A sharded parameter of all ranks; any other as it is."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _fit(rank, strategy, ranks, batch_size, folder=None):
    """Three epochs; with a folder, the last two go on from a checkpoint of the first."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    seen = []
    for epochs in (3,) if folder is None else (1, 3):
        given = {"accelerator": "cpu", "devices": ranks, "max_epochs": epochs, "enable_checkpointing": False}
        trainer, model = pl.Trainer(strategy=strategy, **given, **quiet), Module()
        resume = f"{folder}/last.ckpt" if folder and epochs == 3 else None
        trainer.fit(model, DataLoader(Points(N), batch_size, shuffle=True), ckpt_path=resume)
        seen += model.seen
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/last.ckpt")
    return {
        "strategy": type(trainer.strategy).__module__,
        "weights": torch.cat([whole(p).detach().flatten() for p in model.parameters()]).numpy(),
        "seen": seen,
        "train": float(trainer.callback_metrics["train"]),
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "elastic"])
@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_a_training_by_name_is_that_of_one_process(kind, tmp_path):
    folder = None if kind == "elastic" else str(tmp_path)
    results = run_ranks(_fit, 2, f"hetero_{kind}", 2, 5, folder, start="fork" if kind == "fsdp" else "pool")
    (alone,) = run_ranks(_fit, 1, "ddp", 1, 10)
    assert {r["strategy"] for r in results} == {f"lightning_hetero.strategies.pytorch_lightning_{kind}"}
    assert sorted(i for r in results for i in r["seen"]) == sorted(alone["seen"])
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    if kind != "elastic":
        for result in results:
            np.testing.assert_allclose(result["weights"], alone["weights"], rtol=1e-12)
            assert result["train"] == pytest.approx(alone["train"], rel=1e-5)


def _refused(rank):
    given = {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False, "max_epochs": 1, "logger": False}
    trainer = pl.Trainer(strategy="hetero_ddp", enable_checkpointing=False, **given)
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="shard='mine'"):
        trainer.fit(Module(), DataLoader(Points(N), 5))


def test_errors_are_those_of_the_namespace():
    run_ranks(_refused, 2, start="fork")


def _fabric(rank):
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=2, strategy="hetero_ddp")
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader, seen = fabric.setup_dataloaders(DataLoader(Points(N), 5, shuffle=True)), []
    for _ in range(3):
        for x, y, index in loader:
            seen += index[: fabric.strategy.engine.own_size].tolist()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    module = type(fabric.strategy).__module__
    fabric.strategy.teardown()
    return {"strategy": module, "weights": flat(model), "seen": seen}


def test_a_training_of_fabric_takes_each_sample_once():
    results = run_ranks(_fabric, 2)
    assert {r["strategy"] for r in results} == {"lightning_hetero.strategies.lightning_fabric_ddp"}
    assert sorted(i for r in results for i in r["seen"]) == sorted([*range(N)] * 3)
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
