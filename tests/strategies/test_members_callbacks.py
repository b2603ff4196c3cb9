"""Callbacks, loggers and schedulers of a training in which workers are lost and come."""

import csv
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.strategies._lightning.membership.joining import join_running
from tests.kept import run_kept
from tests.strategies.test_membership import EPOCHS, KILL, LOCAL, SLOTS, STEPS, Numbers, Suffers, wait_for


class Follows(Suffers):
    """Its learning rate follows a metric; ``score`` is logged in the second batch of an epoch only."""

    def __init__(self, folder, faults, monitor):
        super().__init__(folder, faults)
        self.monitor = monitor

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if batch_idx == 1:
            self.log("score", 1.0)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


class Config:
    """Stands for the parser of a LightningCLI, which has read this."""

    def save(self, config, path, **kwargs):
        with open(path, "a") as file:
            file.write("written once\n")


def _train(folder, faults, monitor, version):
    model = Follows(folder, faults, monitor)
    if model.life:
        wait_for(folder / "alone")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=SLOTS,
        plugins=[TorchElasticEnvironment()],
        strategy=HeteroDDPStrategy(replan=4),
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, "log", version, flush_logs_every_n_steps=1),
        callbacks=[SaveConfigCallback(Config(), SimpleNamespace())],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Numbers(), batch_size=LOCAL, shuffle=True), DataLoader(Numbers(), batch_size=30))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    (folder / f"rate-{trainer.global_rank}").write_text(f"{rate}")


def rows_of(path):
    with open(path, newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]


@pytest.mark.parametrize("lost", [None, (0, 6), (1, 6), (0, STEPS // EPOCHS + 4)])
@pytest.mark.parametrize(("monitor", "version"), [("val", None), ("score", "mine")])
def test_rates_rows_and_files_are_those_of_an_undisturbed_training(tmp_path, monitor, lost, version):
    faults = [] if lost is None else [(lost[0], 0, lost[1], "forward", KILL)]
    for slot, life, *_ in faults:
        (tmp_path / f"expects-{slot}-{life}").touch()
    assert run_kept(_train, SLOTS, tmp_path, faults, monitor, version) == [0] * SLOTS
    rates = [float(path.read_text()) for path in tmp_path.glob("rate-*")]
    assert rates == [0.05] * SLOTS, "the metric was no better in the second epoch"
    files = sorted((tmp_path / "log").glob("*/metrics.csv"))
    first = rows_of(files[0])
    assert sorted(step for path in files for step in rows_of(path)) == list(range(STEPS))
    assert first == list(range(len(first))), "what the first rank 0 has written stays, and the next goes on there"
    if version or lost is None or lost[0]:
        assert len(files) == 1
    configs = list((tmp_path / "log").glob("*/config.yaml"))
    assert [path.read_text() for path in configs] == ["written once\n"]


def test_loggers_and_callbacks_of_the_users_with_such_names_are_left_alone():
    class CSVLogger:
        pass

    class SaveConfigCallback:
        pass

    callback = SaveConfigCallback()
    join_running(SimpleNamespace(callbacks=[callback], loggers=[CSVLogger()], is_global_zero=True))
    assert vars(callback) == {}
