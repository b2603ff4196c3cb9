"""The training of the demo, whose workers note what they do and take orders to fail: a script for keepers.

Digits, network and batches are those of ``examples/demo.py``. It goes on until it is told to end.
"""

import argparse
import sys
from pathlib import Path

import torch
from _lossy_notes import Noted, quiet_trainer, train_and_save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _demo_train import BATCH_SIZE, SHARES, DigitNet, accuracy, digits

SIDE, SHIFTS = 24, 5
SAMPLES = 7200
TOTAL = BATCH_SIZE * len(SHARES)


class Fit(Noted):
    """The demo's network."""

    def __init__(self, folder):
        super().__init__(folder)
        torch.manual_seed(0)
        self.net = DigitNet(SIDE).net

    def training_step(self, batch, batch_idx):
        x, y, indices = batch
        self.note_step(indices)
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def accuracy_of(weights):
    """Return the share of the test images that a network with these weights recognises."""
    model = DigitNet(SIDE)
    model.net.load_state_dict(weights)
    return accuracy(model, digits(SIDE, 1)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    data = digits(SIDE, SHIFTS)[0]
    data = TensorDataset(*data.tensors, torch.arange(len(data)))
    train_and_save(quiet_trainer(), Fit(args.folder), DataLoader(data, BATCH_SIZE, shuffle=True), args.folder)


if __name__ == "__main__":
    main()
