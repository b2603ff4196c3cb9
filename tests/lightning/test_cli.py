"""LightningCLI makes the strategy from its name, from a class with arguments, and from the YAML of an example."""

import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_hetero import BlockTopK, DynamicBatchPIDCallback, HeteroDDPStrategy
from lightning_hetero.config import HeteroConfig
from tests.helpers import Regressor

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASS = "--trainer.strategy=lightning_hetero.HeteroDDPStrategy"


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])


def trainer_of(*arguments):
    given = ["--trainer.accelerator=cpu", *arguments]
    quiet = {"save_config_callback": None, "seed_everything_default": False}
    return LightningCLI(Regressor, run=False, args=given, **quiet).trainer


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (["--trainer.strategy=hetero_ddp", "--trainer.devices=2"], {}),
        ([CLASS, "--trainer.strategy.local_batch_sizes=[6,2]"], {"local_batch_sizes": (6, 2)}),
        ([CLASS, "--trainer.strategy.compression=lightning_hetero.BlockTopK"], {"compression": BlockTopK()}),
    ],
)
def test_by_name_and_by_arguments_of_the_class(arguments, config):
    strategy = trainer_of(*arguments).strategy
    assert type(strategy) is HeteroDDPStrategy
    assert strategy.config == HeteroConfig(**config)


def test_the_example_makes_what_it_says(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        trainer = trainer_of(f"--config={EXAMPLES / 'cli.yaml'}")
    finally:
        sys.modules.pop("_model", None)
    assert trainer.strategy.config.hysteresis == 0.05
    assert [c.policy for c in trainer.callbacks if isinstance(c, DynamicBatchPIDCallback)] == ["pid"]
