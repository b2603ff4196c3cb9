"""Digits and text at 1 % density: as good as dense training, within 1.3 times the samples."""

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._language_workload import train
from lightning_hetero import BlockTopK, HeteroDDPStrategy
from lightning_hetero.optim import SparseSGD
from lightning_hetero.strategies import fabric_ddp
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
    dense = run_ranks(_train, 2, None, EPOCHS, timeout=240)[0]
    assert max(dense) > 0.96
    for settings in ({"density": 0.01}, {"density": 0.01, "value_dtype": "int8"}):
        ours, other = run_ranks(_train, 2, BlockTopK(**settings), int(1.3 * EPOCHS))
        assert ours == other
        assert max(ours) >= max(dense) - 0.01


STEPS, RATE = 600, 0.003
SMALL = {"sequences": 8, "width": 32, "layers": 1, "context": 32}


def _learn_text(rank, world_size, steps, rate, **settings):
    strategy = fabric_ddp.HeteroDDPStrategy(policy="even", **settings) if settings else "auto"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    return train(fabric, rate, steps, 0, **SMALL)


def _sparsely(rank, compression):
    return _learn_text(rank, 2, int(1.3 * STEPS), 2 * RATE, compression=compression, sparse_optimizer=True)


def test_text_at_one_percent():
    """A transformer under AdamW, as docs/compression.md says: single elements, balanced, twice the learning rate."""
    dense = run_ranks(_learn_text, 1, 1, STEPS, RATE, timeout=240)[0]
    ours, other = run_ranks(_sparsely, 2, "block_topk(density=0.01, block=1, scores='balanced')", timeout=240)
    assert ours == other
    best, dense_best = (min(loss for _, loss in losses) for losses in (ours, dense))
    assert best <= dense_best < 2.4
    assert ours[-1][0] <= 1.3 * dense[-1][0]
