"""One rank of a time-to-accuracy run: trains until a test accuracy is reached and writes how it went.

Started on every node by ``adaptive.py``; not meant to be run by hand.
"""

import argparse
import json
import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import AdaptiveBatchCallback

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=PossibleUserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)


def digits(seed):
    """The 1797 images of digits that come with scikit-learn; real data."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    return train_test_split(x, y, test_size=357, random_state=seed, stratify=y), 10


def synthetic(seed):
    """Labels of a random teacher network on Gaussian inputs, a fifth of the training labels wrong; not real data."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((14_000, 64)).astype(np.float32)
    y = (np.tanh(x @ rng.standard_normal((64, 32)) / 4) @ rng.standard_normal((32, 10))).argmax(axis=1)
    x_train, x_test, y_train, y_test = x[:12_000], x[12_000:], y[:12_000].copy(), y[12_000:]
    wrong = rng.random(len(y_train)) < 0.2
    y_train[wrong] = rng.integers(0, 10, wrong.sum())
    return (x_train, x_test, y_train, y_test), 10


TASKS = {"digits": (digits, 0.97), "synthetic": (synthetic, 0.62)}


class Classifier(L.LightningModule):
    """An ordinary module; it knows nothing of how it is trained."""

    def __init__(self, features, classes, width, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class UntilAccurate(L.Callback):
    """Takes the test accuracy after every epoch, outside the clock, and stops at the target."""

    def __init__(self, x, y, target):
        self.x, self.y, self.target = torch.tensor(x), torch.tensor(y), target
        self.seconds, self.samples, self.rows = 0.0, 0, []

    def on_train_epoch_start(self, trainer, pl_module):
        self.begin = time.perf_counter()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        plan = getattr(trainer.strategy, "plan", None)
        self.samples += len(batch[0]) * trainer.world_size if plan is None else plan.total_batch_size

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.strategy.barrier()
        self.seconds += time.perf_counter() - self.begin
        pl_module.eval()
        with torch.no_grad():
            accuracy = (pl_module.net(self.x).argmax(dim=1) == self.y).float().mean().item()
        pl_module.train()
        plan = getattr(trainer.strategy, "plan", None)
        total = None if plan is None else plan.total_batch_size
        self.rows.append((self.seconds, accuracy, self.samples, trainer.global_step, total))
        if accuracy >= self.target:
            trainer.should_stop = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=["ddp", "fixed", "adaptive"])
    parser.add_argument("--task", required=True, choices=list(TASKS))
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--largest", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    L.seed_everything(args.seed, verbose=False)
    load, target = TASKS[args.task]
    (x, x_test, y, y_test), classes = load(args.seed)
    watch = UntilAccurate(x_test, y_test, target)
    policy = [AdaptiveBatchCallback(args.largest)] if args.kind == "adaptive" else []
    trainer = L.Trainer(
        strategy="ddp" if args.kind == "ddp" else "hetero_ddp",
        accelerator="cpu",
        devices=1,
        num_nodes=world,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*policy, watch],
    )
    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), args.batch, shuffle=True)
    trainer.fit(Classifier(x.shape[1], classes, args.width, args.lr), loader)
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump({"rows": watch.rows, "target": target, "reached": watch.rows[-1][1] >= target}, file)


if __name__ == "__main__":
    main()
