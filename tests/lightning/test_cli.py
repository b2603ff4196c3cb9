"""LightningCLI makes the strategy from its name, from a class with arguments, and from YAML."""

import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_hetero import AdaptiveBatchCallback, BlockTopK, DynamicBatchPIDCallback, GNSCallback, HeteroDDPStrategy
from lightning_hetero.config import HeteroConfig
from tests.helpers import Regressor

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASS = "--trainer.strategy=lightning_hetero.HeteroDDPStrategy"
YAML = """
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_hetero.HeteroDDPStrategy
    init_args:
      compression: {class_path: lightning_hetero.BlockTopK, init_args: {density: 0.05}}
      replan: 20
      max_local_batch_sizes: [64, 16]
  callbacks:
    - class_path: lightning_hetero.GNSCallback
    - class_path: lightning_hetero.AdaptiveBatchCallback
      init_args:
        max_total_batch_size: 256
        lr_scaling: sqrt
"""


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
        ([CLASS, "--trainer.strategy.compression=block_topk"], {"compression": BlockTopK()}),
    ],
)
def test_by_name_and_by_arguments_of_the_class(arguments, config):
    strategy = trainer_of(*arguments).strategy
    assert type(strategy) is HeteroDDPStrategy
    assert strategy.config == HeteroConfig(**config)


def test_strategy_and_callbacks_from_yaml(tmp_path):
    (tmp_path / "config.yaml").write_text(YAML)
    trainer = trainer_of(f"--config={tmp_path / 'config.yaml'}")
    config = trainer.strategy.config
    assert (config.compression, config.replan) == (BlockTopK(density=0.05), 20)
    assert list(config.max_local_batch_sizes) == [64, 16]
    adaptive = next(callback for callback in trainer.callbacks if isinstance(callback, AdaptiveBatchCallback))
    assert adaptive.planner.max_total_batch_size == 256
    assert any(isinstance(callback, GNSCallback) for callback in trainer.callbacks)


def test_the_example_makes_what_it_says(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        trainer = trainer_of(f"--config={EXAMPLES / 'cli.yaml'}")
    finally:
        sys.modules.pop("_model", None)
    assert trainer.strategy.config.hysteresis == 0.05
    assert [c.policy for c in trainer.callbacks if isinstance(c, DynamicBatchPIDCallback)] == ["pid"]
