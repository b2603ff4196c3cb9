"""One rank of a training on emulated devices, for ``dynamic_batching.py``; not meant to be run by hand.

A small network whose passes take the times of given device profiles. Each rank writes the seconds of each of its steps,
what its device computed in it, and (rank 0) the plans.
"""

import argparse
import json
import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from _dynamic_batching_rule import AsPrinted
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import BatchPlan, DynamicBatchPIDCallback, HeteroDDPStrategy, PerfModelCallback
from lightning_hetero.callbacks.base import PolicyCallback
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

torch.set_num_threads(1)
warnings.filterwarnings("ignore", category=PossibleUserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)


class Noise(Dataset):
    """Random rows; what is in them does not matter for time."""

    def __init__(self, count):
        self.count, self.x = count, torch.randn(64, 64)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.x[i % 64], float(i % 2)


class Perceptron(L.LightningModule):
    """An ordinary module; it knows nothing of devices."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return ((self.net(x).mean(1) - y) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Steps(L.Callback):
    """Clock of each step, and plans of a script that are adopted after their steps."""

    def __init__(self, script):
        self.script, self.ends, self.sizes = script, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ends.append(time.perf_counter())
        self.sizes.append(len(batch[0]))
        if len(self.ends) == 1:
            self.first = time.time()
        if str(len(self.ends)) in self.script:
            sizes = self.script[str(len(self.ends))]
            trainer.strategy.adopt(BatchPlan(sum(sizes), tuple(sizes)), "script")


def strategy_of(kind, dead_band, sizes):
    """Strategy and callbacks of a kind of run; ``sizes`` are those to begin with, in proportion to cores."""
    options = {"bucket_cap_mb": 0.02, "process_group_backend": "gloo"}
    if kind == "ddp":
        return DDPStrategy(**options), []
    if kind == "script":
        return HeteroDDPStrategy(policy="even", **options), []
    if kind == "static":
        return HeteroDDPStrategy(local_batch_sizes=sizes, **options), []
    if kind == "pid":
        return HeteroDDPStrategy(**options), [DynamicBatchPIDCallback(dead_band=dead_band, start="equal")]
    if kind == "pid open loop":
        return HeteroDDPStrategy(policy="pid", local_batch_sizes=sizes, **options), []
    if kind == "as printed":
        return HeteroDDPStrategy(replan=4, **options), [PolicyCallback(AsPrinted(dead_band=dead_band))]
    return HeteroDDPStrategy(**options), [PerfModelCallback()]


def train(run, seed):
    """What one training of this rank took."""
    profiles = [DeviceProfile(**profile) for profile in run["profiles"]]
    L.seed_everything(seed, verbose=False)
    strategy, callbacks = strategy_of(run["kind"], run["dead_band"], run["sizes"])
    steps, device = Steps(run["script"]), EmulatedDeviceCallback(profiles, seed=100 * seed)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=len(profiles),
        strategy=strategy,
        max_steps=run["steps"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, device, steps],
    )
    trainer.fit(Perceptron(), DataLoader(Noise(6 * run["steps"] * run["batch"] * len(profiles)), run["batch"]))
    passes = list(device.device.times)
    computed = [one.taken + other.taken for one, other in zip(passes[::2], passes[1::2], strict=True)]
    host = [one.host for one in passes]
    return {"ends": steps.ends, "sizes": steps.sizes, "computed": computed, "host": host, "first": steps.first}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", required=True, help="JSON: the trainings, one after the other")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    environment, found = dict(os.environ), []  # Lightning takes a part of it away at the end of a training
    for run in json.loads(args.runs):
        os.environ.update(environment)
        found.append(train(run, args.seed))
    with open(f"{args.out}.{environment['RANK']}", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
