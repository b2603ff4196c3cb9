"""A small fit whose workers note what they do, and take orders to fail: a script for torchrun, with keepers or without.

A worker takes 2 ms (``--ms``) for each of its samples, so that a smaller group is slower, as on workers that do not
share cores.
"""

import argparse
import time
from pathlib import Path

import torch
from _lossy_notes import Noted, quiet_trainer, train_and_save
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, INPUTS, LOCAL = 960, 16, 8
RATE, MOMENTUM = 0.01, 0.9
WORKERS, KEPT = 4, 10


class Numbers(Dataset):
    """Inputs that depend on the index alone."""

    def __init__(self):
        self.inputs = torch.randn(SAMPLES, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return self.inputs[i], i


def network():
    torch.manual_seed(3)
    layers = nn.Linear(INPUTS, 64, dtype=torch.float64), nn.Tanh(), nn.Linear(64, 1, dtype=torch.float64)
    return nn.Sequential(*layers)


def loss_of(net, x):
    return (net(x).squeeze(1) - x.sum(1).sin()).square().mean()


class Fit(Noted):
    """A model that takes its time for each sample."""

    def __init__(self, folder, seconds_per_sample):
        super().__init__(folder)
        self.net, self.seconds_per_sample = network(), seconds_per_sample

    def training_step(self, batch, batch_idx):
        x, indices = batch
        size = self.note_step(indices)
        slow = 5 if time.monotonic() < self.orders.slow_until else 1
        time.sleep(self.seconds_per_sample * size * slow)
        return loss_of(self.net, x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)


def fit(folder, seconds_per_sample, saves, last=False):
    saving = [ModelCheckpoint(folder / "saved", every_n_train_steps=1, filename="fit", enable_version_counter=False)]
    keeping = [ModelCheckpoint(folder / "saved", every_n_train_steps=KEPT, save_top_k=0, save_last=True)]
    trainer = quiet_trainer(saving if saves else keeping if last else [])
    saved = folder / "saved" / ("last.ckpt" if last else "fit.ckpt")
    loader = DataLoader(Numbers(), LOCAL, shuffle=True)
    model = Fit(folder, seconds_per_sample)
    train_and_save(trainer, model, loader, folder, saved if saved.exists() else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ms", type=float, default=2.0, help="of a sample")
    parser.add_argument("--saves", action="store_true", help="save a checkpoint after each step")
    parser.add_argument("--last", action="store_true", help=f"save last.ckpt after each {KEPT} steps")
    args = parser.parse_args()
    fit(args.folder, args.ms / 1000, args.saves, args.last)


if __name__ == "__main__":
    main()
