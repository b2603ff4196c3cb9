"""Setup of a model: the least batch that batch normalization needs."""

from torch import nn

from lightning_hetero.frontend.model_setup import raise_minimum
from tests.engine.test_sync_rounds import alone


def test_batch_normalization_raises_the_minimum_once():
    engine, model = alone(), nn.Sequential(nn.BatchNorm1d(3))
    assert [raise_minimum(engine, model) for _ in range(2)] == [True, False]
    assert engine.data.min_local == 2
