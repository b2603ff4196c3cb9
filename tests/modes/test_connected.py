"""Strategies that are connected by hand, step by step and without a fit, as Lightning's tests of its own ones are."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from tests.helpers import Points, Regressor, collected, trainer_of

CLASSES = (HeteroDDPStrategy, HeteroElasticStrategy)


class Loaded(Regressor):
    """Has loaders of its own."""

    def train_dataloader(self):
        return DataLoader(Points(16), 4)

    def val_dataloader(self):
        return DataLoader(Points(8), 4)

    test_dataloader = val_dataloader

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    test_step = validation_step


def connected(strategy, devices=1):
    """A trainer whose strategy has a module before the module has a trainer."""
    trainer, model = trainer_of(strategy, devices), Loaded()
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model)
    return trainer, model


@pytest.mark.parametrize("cls", CLASSES)
def test_the_timeout_goes_to_the_process_group(cls, monkeypatch):
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: met.append((given, named)))
    trainer, model = connected(cls(timeout=timedelta(seconds=30)))
    model.trainer = trainer
    trainer.strategy.setup_environment()
    ((given, named),) = met
    assert given == ("gloo",)
    assert (named["rank"], named["world_size"], named["timeout"]) == (0, 1, timedelta(seconds=30))


@pytest.mark.parametrize("cls", CLASSES)
def test_before_the_processes_have_met_a_train_loader_is_left_even_and_a_value_can_be_reduced(cls):
    lines = collected()
    trainer, model = connected(cls(), 2)
    trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    given = model.train_dataloader()
    assert trainer.strategy.process_dataloader(given) is given
    assert sum("before the processes have met" in line for line in lines) == 1
    assert float(cls(parallel_devices=[torch.device("cpu")]).reduce(torch.tensor(3))) == 3.0


@pytest.mark.parametrize("cls", CLASSES)
def test_a_checkpoint_can_be_read_where_nothing_is_set_up(cls, tmp_path):
    """As after a training in processes that were spawned, in the one that spawned them."""
    trainer, model = connected(cls())
    states = [model.configure_optimizers().state_dict()]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, tmp_path / "last.ckpt")
    checkpoint = trainer.strategy.load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert set(checkpoint) == {"state_dict", "optimizer_states"}
    trainer.strategy.optimizers = [model.configure_optimizers()]
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    assert trainer.strategy.optimizers[0].state_dict() == states[0]
