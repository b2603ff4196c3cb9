"""One training of the demo: digits on three workers of unequal speed. ``demo.py`` runs it once per strategy.

Lightning starts the other workers by itself. Rank 0 writes what it measured as JSON.
"""

import argparse
import atexit
import json
import logging
import os
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: each worker is one core

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.simulate import Throttle

SHARES = (0.8, 0.4, 0.24)  # of a core, by local rank; together less than 2 cores, so that they do not compete
PERIOD = 0.01  # seconds of running and stopping, short against a step
BATCH_SIZE = 96  # per worker on average
TRAIN_IMAGES = 1440  # 5 total batches: no ragged step, so both strategies see the very same batches

torch.set_num_threads(1)
atexit.register(time.sleep, 0.1)  # torch's gloo threads still free tensors, which aborts an interpreter that ends
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*does not have many workers")
warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")


def digits(side, shifts):
    """Train and test images enlarged to ``side``; every train image is there ``shifts`` times, moved a little."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, train_size=TRAIN_IMAGES, stratify=labels, random_state=0)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)

    def enlarged(x):
        x = x.float().reshape(-1, 1, 8, 8) / 16 - 0.3
        return nn.functional.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)

    pixels = side // 8
    moves = [(0, 0), (pixels, 0), (-pixels, 0), (0, pixels), (0, -pixels)][:shifts]
    moved = [torch.roll(enlarged(x_train), move, dims=(2, 3)) for move in moves]
    return TensorDataset(torch.cat(moved), y_train.repeat(shifts)), TensorDataset(enlarged(x_test), y_test)


class DigitNet(L.LightningModule):
    """Three convolutions; nothing in it knows of unequal workers."""

    def __init__(self, side):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(64 * (side // 4) ** 2, 10),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class SlowWorkers(L.Callback):
    """Stops and continues each worker so that it runs for its share of the time, while it trains."""

    def __init__(self):
        self.throttle = None

    def on_train_start(self, trainer, pl_module):
        if SHARES[trainer.local_rank] < 1.0:
            self.throttle = Throttle(SHARES[trainer.local_rank], period=PERIOD).start()
        trainer.strategy.barrier()

    def on_train_end(self, trainer, pl_module):
        if self.throttle is not None:
            self.throttle.stop()


class Recorder(L.Callback):
    """The clock at the end of every step, and the split of the step; the same for both strategies."""

    def __init__(self):
        self.clock, self.splits = [], []

    def on_train_start(self, trainer, pl_module):
        self.clock.append(time.perf_counter())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.clock.append(time.perf_counter())
        plan = getattr(trainer.strategy, "plan", None)
        self.splits.append(plan.local_batch_sizes if plan else (BATCH_SIZE,) * trainer.world_size)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            steps = trainer.num_training_batches
            mean = (self.clock[-1] - self.clock[-1 - steps]) / steps
            split = "/".join(map(str, self.splits[-1]))
            epoch = f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}"
            print(f"  {epoch}: {mean * 1e3:4.0f} ms per step, split {split}", flush=True)


class Metrics(Logger):
    """Keeps the metrics that ``hetero_ddp`` logs at every look at its plan; the run's record goes into its folder."""

    name, version = "demo", "0"

    def __init__(self, folder):
        super().__init__()
        self.rows, self._folder = [], folder

    @property
    def save_dir(self):
        return self._folder

    def log_metrics(self, metrics, step=None):
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, params, *args, **kwargs):
        pass


@torch.no_grad()
def accuracy(model, dataset):
    """Share of the test images that are recognised."""
    x, y = dataset.tensors
    model.eval()
    return float((model.net(x).argmax(dim=1) == y).float().mean())


def train(strategy, quick, record):
    """Train on this rank; what was measured."""
    side, shifts, epochs = (16, 1, 4) if quick else (24, 5, 7)
    train_set, test_set = digits(side, shifts)
    L.seed_everything(0, verbose=False)
    model, recorder, metrics = DigitNet(side), Recorder(), Metrics(record)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=len(SHARES),
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[SlowWorkers(), recorder],
        logger=metrics,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True))
    result = {
        "total_batch_size": BATCH_SIZE * trainer.world_size,
        "clock": recorder.clock,
        "splits": recorder.splits,
        "metrics": metrics.rows,
        "plans": [
            {
                "step": entry.epoch * trainer.num_training_batches + entry.step,
                "split": entry.plan.local_batch_sizes,
                "predicted": entry.plan.step_time,
                "reason": entry.reason,
            }
            for entry in getattr(trainer.strategy, "plan_history", ())
        ],
    }
    if trainer.is_global_zero:
        result["accuracy"] = accuracy(model, test_set)
    return result, trainer.is_global_zero


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", required=True, choices=["ddp", "hetero_ddp"])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--record", required=True, help="folder of the run's record")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    result, is_first = train(arguments.strategy, arguments.quick, arguments.record)
    if is_first:
        arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
