"""A training on emulated devices of cluster A, for ``cannikin.py``: an ordinary Lightning script, run by all ranks.

    python benchmarks/papers/_cannikin_emulated.py SYSTEM SEED STEPS FILE

Rank 0 writes the second at which each step ended, and the plans.
"""

import json
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning as L
import torch
from _cannikin_clusters import NOISE, cluster
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
BATCH = 43
"""Samples of a worker on average: 128 do not divide by three."""


def profiles() -> list[DeviceProfile]:
    """Devices of cluster A that train ResNet-50."""
    return [replace(device, jitter=NOISE) for device in cluster("A", "ResNet-50").devices]


class Perceptron(L.LightningModule):
    """An ordinary module; it knows nothing of devices."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Clock(L.Callback):
    """Second at which each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends.append(time.perf_counter())


def main() -> None:
    system, seed, steps, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    L.seed_everything(seed, verbose=False)
    options = {"bucket_cap_mb": 0.02, "process_group_backend": "gloo"}
    strategy = DDPStrategy(**options) if system == "DDP" else HeteroDDPStrategy(**options)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EmulatedDeviceCallback(profiles(), seed=100 * seed), clock],
    )
    trainer.fit(Perceptron(), DataLoader(TensorDataset(torch.randn(4 * steps * BATCH * 3, 64)), BATCH))
    if trainer.global_rank == 0:
        plans = [] if system == "DDP" else [(e.step, list(e.plan.local_batch_sizes)) for e in strategy.plan_history]
        Path(file).write_text(json.dumps({"ends": clock.ends, "plans": plans}))


if __name__ == "__main__":
    main()
