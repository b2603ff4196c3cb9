"""One rank of `adaptive_sgd.py confirm`: trains on an emulated device and writes how precision grew with time.

Started on every rank by that command; not meant to be run by hand. The clock stands still during evaluation.
"""

import argparse
import json
import os
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from _adaptive_sgd_task import BATCH, BATCH_SECONDS, MEGA_BATCH, METHODS, OPTIMIZERS, data, model, profiles
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from lightning_hetero import HeteroDDPStrategy, HeteroElasticStrategy
from lightning_hetero.data import sparse_loader
from lightning_hetero.simulate import EmulatedDeviceCallback

warnings.filterwarnings("ignore", category=PossibleUserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)


class Curve(L.Callback):
    """Seconds of training and precision at each evaluation."""

    def __init__(self):
        self.points, self.seconds, self.last = [], 0.0, 0.0

    def on_train_start(self, trainer, pl_module):
        self.last = time.perf_counter()

    def on_validation_start(self, trainer, pl_module):
        self.seconds += time.perf_counter() - self.last

    def on_validation_end(self, trainer, pl_module):
        self.points.append((0, self.seconds, 0, float(trainer.callback_metrics["precision_at_1"])))
        self.last = time.perf_counter()


class Exchange(L.Callback):
    """A link on which each exchange takes this much longer than on this machine."""

    def __init__(self, seconds):
        self.seconds, self.merges = seconds, 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not hasattr(trainer.strategy, "merges"):  # averaged gradients are exchanged before each step
            time.sleep(self.seconds)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        merges = len(getattr(trainer.strategy, "merges", ()))
        if merges > self.merges:
            time.sleep(self.seconds)
        self.merges = merges


def strategy_of(method):
    """Strategy of a method that the package has."""
    if not method.merge:
        return HeteroDDPStrategy() if method.balanced else "ddp"
    own = {"renormalize": False, "damped": False} if method.printed else {}
    return HeteroElasticStrategy(merge=method.merge, mega_batch_size=MEGA_BATCH, **own)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=json.loads, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--exchange", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    spec, method = args.spec, METHODS[args.spec["method"]]
    torch.set_num_threads(1)
    L.seed_everything(spec["seed"], verbose=False)
    train, test = data(spec["shape"])
    module = model(train, spec["optimizer"], spec["seed"])
    module.configure_optimizers = lambda: OPTIMIZERS[spec["optimizer"]](module.parameters(), spec["lr"])
    devices = EmulatedDeviceCallback(
        profiles(spec["cluster"], spec["workers"]), seed=100 * spec["seed"], batch_size=lambda batch: batch.size
    )
    curve = Curve()
    trainer = L.Trainer(
        strategy=strategy_of(method),
        accelerator="cpu",
        devices=spec["workers"],
        max_epochs=args.epochs,
        val_check_interval=MEGA_BATCH / len(train),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[devices, Exchange(args.exchange * BATCH_SECONDS), curve],
    )
    trainer.fit(module, sparse_loader(train, BATCH, shuffle=True), sparse_loader(test, 500))
    if int(os.environ["RANK"]) == 0:
        merges = [
            (m.batch_sizes, m.updates, m.perturbed, round(1 - sum(m.busy) / len(m.busy) / max(m.busy), 4))
            for m in getattr(trainer.strategy, "merges", ())
        ]
        host = [t.host for t in devices.device.times]
        host_added = {"host_median": sorted(host)[len(host) // 2], "passes": len(host)}
        args.out.write_text(json.dumps({**spec, "points": curve.points, "merges": merges, **host_added}))


if __name__ == "__main__":
    main()
