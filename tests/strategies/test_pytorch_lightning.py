"""The standalone namespace: ``pytorch_lightning.Trainer(strategy="hetero_ddp")`` gives what one process gives."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points, run_ranks

pl = pytest.importorskip("pytorch_lightning")

N, EPOCHS = 42, 3  # four batches of ten and a ragged one of two


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        engine = getattr(self.trainer.strategy, "engine", None)
        self.seen += [] if getattr(engine, "own_size", None) == 0 else indices.tolist()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def whole(parameter):
    """A sharded parameter of all ranks; any other as it is."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _fit(rank, strategy, world_size, batch_size, ckpt_path=None, folder=None, max_epochs=EPOCHS, **options):
    if isinstance(strategy, dict):
        from lightning_hetero.strategies.pytorch_lightning_ddp import HeteroDDPStrategy

        strategy = HeteroDDPStrategy(**strategy)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Module()
    loaders = DataLoader(Points(N), batch_size, shuffle=True), DataLoader(Points(8), 4)
    trainer.fit(model, *loaders, ckpt_path=ckpt_path)
    if folder is not None:
        trainer.save_checkpoint(f"{folder}/last.ckpt")
    return {
        "strategy": type(trainer.strategy).__module__,
        "weights": torch.cat([whole(p).detach().flatten() for p in model.parameters()]).numpy(),
        "seen": model.seen,
        "steps": trainer.global_step,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def close(ours, alone, kind="ddp"):
    for result in ours:
        assert result["strategy"] == f"lightning_hetero.strategies.pytorch_lightning_{kind}"
        np.testing.assert_allclose(result["weights"], alone["weights"], rtol=1e-12)
        assert result["steps"] == alone["steps"]
        assert result["metrics"]["train"] == pytest.approx(alone["metrics"]["train"], rel=1e-5)
    assert sorted(i for result in ours for i in result["seen"]) == sorted(alone["seen"])


@pytest.mark.parametrize("strategy", ["hetero_ddp", {"local_batch_sizes": [7, 3]}], ids=str)
def test_equal_to_one_process(strategy):
    (alone,) = run_ranks(_fit, 1, "ddp", 1, 10)
    close(run_ranks(_fit, 2, strategy, 2, 5), alone)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resumes_from_its_checkpoint(tmp_path, kind):
    (alone,) = run_ranks(_fit, 1, "ddp", 1, 10)
    first = run_ranks(_fit, 2, f"hetero_{kind}", 2, 5, None, str(tmp_path), 1)
    rest = run_ranks(_fit, 2, f"hetero_{kind}", 2, 5, str(tmp_path / "last.ckpt"))
    for before, after in zip(first, rest, strict=True):
        after["seen"] = before["seen"] + after["seen"]
    close(rest, alone, kind)


def _bad(rank):
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="shard='mine'"):
        _fit(rank, "hetero_ddp", 2, 4, use_distributed_sampler=False)


def test_errors_are_those_of_the_namespace():
    run_ranks(_bad, 2, timeout=60)


def _elastic(rank):
    from lightning_hetero.strategies.pytorch_lightning_elastic import HeteroElasticStrategy

    return _fit(rank, HeteroElasticStrategy(merge="adaptive", mega_batch_size=16), 2, 4)


def test_elastic_averaging():
    for results in (run_ranks(_elastic, 2), run_ranks(_fit, 2, "hetero_elastic", 2, 4)):
        assert {r["strategy"] for r in results} == {"lightning_hetero.strategies.pytorch_lightning_elastic"}
        assert sorted(i for r in results for i in r["seen"]) == sorted([*range(N)] * EPOCHS)
        np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
        assert results[0]["metrics"] == results[1]["metrics"]
