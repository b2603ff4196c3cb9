"""What torchrun starts in the tests: a training that saves each step, goes on from there, and may be killed.

Usage: script.py FOLDER BATCH_SIZE EPOCHS. A step sleeps while there is a file ``slow`` in the folder. The file ``kill``
there holds, for each attempt, the rank to end with SIGKILL, at which point, and in which step: ``1 forward 5``.
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


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1, dtype=torch.float64)
        self.victim = None

    def on_train_start(self):
        attempt = self.trainer.strategy.broadcast(len(list(folder.glob("attempt-*-0.jsonl"))))
        plans = (folder / "kill").read_text().splitlines() if (folder / "kill").exists() else []
        if attempt < len(plans):
            rank, point, step = plans[attempt].split()
            self.victim = (point, int(step)) if int(rank) == self.global_rank else None
        self.file = open(folder / f"attempt-{attempt:02}-{self.global_rank}.jsonl", "w")  # noqa: SIM115
        known = sorted(self.trainer.strategy._callback.planner.profiles)
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
        time.sleep(0.1 if (folder / "slow").exists() else 0.0)
        return self.net(x).square().mean()

    def on_after_backward(self):
        self.die("backward")

    def on_save_checkpoint(self, checkpoint):
        self.die("saving")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return torch.full((4,), float(i), dtype=torch.float64) / SAMPLES, i


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, batch_size, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = Model()
    gather = ControlPlane.gather

    def gather_or_die(self, values):
        if model._trainer is not None:
            model.die("exchange")
        return gather(self, values)

    ControlPlane.gather = gather_or_die

    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", 1))),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", os.environ.get("SLURM_NNODES", 1))),
        strategy=HeteroDDPStrategy(replan=4),
        max_epochs=epochs,
        callbacks=[PerfModelCallback(), ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Data(), batch_size=batch_size, shuffle=True)
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero:
        (folder / "done").write_text(json.dumps({"step": trainer.global_step, "world": trainer.world_size}))
