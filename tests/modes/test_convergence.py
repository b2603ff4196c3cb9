"""Digits at 1 % density: as good as dense training, within 1.3 times the samples."""

import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.optim import SparseSGD
from tests.helpers import trainer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow("long trainings, compared by their accuracy")
TRAIN, EPOCHS = 1400, 16


def digits():
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16.0, dtype=torch.float32)[order], torch.tensor(y)[order]


class Digits(L.LightningModule):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.sparse, self.accuracies = sparse, []

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self):
        x, y = digits()
        with torch.no_grad():
            self.accuracies.append(float((self.net(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean()))

    def configure_optimizers(self):
        optimizer = SparseSGD if self.sparse else torch.optim.SGD
        return optimizer(self.parameters(), lr=0.05, momentum=0.9)


def _train(rank, compression, epochs):
    x, y = digits()
    model = Digits(sparse=compression is not None)
    trainer = trainer_of(HeteroDDPStrategy(local_batch_sizes=[24, 8], compression=compression), 2, max_epochs=epochs)
    trainer.fit(model, DataLoader(TensorDataset(x[:TRAIN], y[:TRAIN]), 16, shuffle=True))
    return model.accuracies


def test_digits_at_one_percent():
    dense = run_ranks(_train, 2, None, EPOCHS)[0]
    assert max(dense) > 0.96
    for settings in ({"density": 0.01}, {"density": 0.01, "value_dtype": "int8"}):
        ours, other = run_ranks(_train, 2, BlockTopK(**settings), int(1.3 * EPOCHS))
        assert ours == other
        assert max(ours) >= max(dense) - 0.01
