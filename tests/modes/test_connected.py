"""A strategy that is connected by hand, without a fit, as in Lightning's tests of its own ones."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from tests.helpers import Regressor, trainer_of


@pytest.mark.parametrize("cls", [HeteroDDPStrategy, HeteroElasticStrategy])
def test_the_timeout_goes_to_the_process_group(cls, monkeypatch):
    met = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: met.append((given, named)))
    trainer, model = trainer_of(cls(timeout=timedelta(seconds=30)), 1), Regressor()
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.strategy.setup_environment()
    ((given, named),) = met
    assert given == ("gloo",)
    assert (named["rank"], named["world_size"], named["timeout"]) == (0, 1, timedelta(seconds=30))
