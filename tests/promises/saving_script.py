"""What the tests of engines start: a training that saves each step, goes on from there, and may be killed.

Usage: script.py FOLDER BATCH_SIZE EPOCHS. A step sleeps while there is a file ``slow`` in the folder. The file ``kill``
there holds, for each attempt, the rank to end with SIGKILL, at which point, and from which step on: ``1 forward 5``.
Every process leaves a file ``pid-...`` with its number.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy, PerfModelCallback
from lightning_hetero.comm import ControlPlane

SAMPLES = 96

POINTS = ("forward", "backward", "optimizer", "validation", "saving", "writing", "exchange")
"""Where a worker may be killed; ``saving`` is before the checkpoint's file is there, ``writing`` before it is whole."""


class Model(L.LightningModule):
    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1, dtype=torch.float64)
        self.net.weight.register_hook(lambda gradient: self.die("backward"))
        self.folder, self.victim = folder, None

    def on_train_start(self):
        attempt = self.trainer.strategy.broadcast(len(list(self.folder.glob("attempt-*-0.jsonl"))))
        plans = (self.folder / "kill").read_text().splitlines() if (self.folder / "kill").exists() else []
        if attempt < len(plans):
            rank, point, step = plans[attempt].split()
            self.victim = (point, int(step)) if int(rank) == self.global_rank else None
        self.file = open(self.folder / f"attempt-{attempt:02}-{self.global_rank}.jsonl", "w")  # noqa: SIM115
        known = sorted(self.trainer.strategy._callback.planner.times.names)
        self.write(world=self.trainer.world_size, known=known, start=self.trainer.global_step)
        self.trainer.strategy.barrier()

    def write(self, **record):
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def die(self, point):
        if self.victim is not None and self.victim[0] == point and self.trainer.global_step >= self.victim[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch, batch_idx):
        x, indices = batch
        counted = self.trainer.strategy.engine.own_size
        sizes = self.trainer.strategy.plan.local_batch_sizes
        self.write(
            step=self.trainer.global_step,
            epoch=self.trainer.current_epoch,
            indices=indices[:counted].tolist(),
            sizes=sizes,
        )
        self.die("forward")
        time.sleep(0.1 if (self.folder / "slow").exists() else 0.0)
        return self.net(x).square().mean()

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.die("optimizer")

    def validation_step(self, batch, batch_idx):
        self.die("validation")
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        self.die("saving")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(torch.utils.data.Dataset):
    def __init__(self, samples=SAMPLES):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return torch.full((4,), float(i), dtype=torch.float64) / SAMPLES, i


def before(owner, name, call):
    """Have ``call`` run before a method of a class."""
    method = getattr(owner, name)

    def replacement(self, *args, **kwargs):
        call()
        return method(self, *args, **kwargs)

    setattr(owner, name, replacement)


def main(folder, batch_size, epochs):
    torch.set_num_threads(1)
    folder = Path(folder)
    (folder / f"pid-{os.getpid()}").touch()
    model = Model(folder)
    before(ControlPlane, "gather", lambda: model._trainer is not None and model.die("exchange"))
    before(Path, "replace", lambda: model.die("writing"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", 1))),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", 1))),
        strategy=HeteroDDPStrategy(replan=4),
        max_epochs=epochs,
        callbacks=[PerfModelCallback(), ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)],
        val_check_interval=6,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Data(), batch_size=batch_size, shuffle=True)
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(model, loader, DataLoader(Data(4)), ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero:
        (folder / "done").write_text(json.dumps({"step": trainer.global_step, "world": trainer.world_size}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
