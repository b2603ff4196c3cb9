"""A small fit whose workers note what they do, and take orders to fail: a script for torchrun, with keepers or without.

Each process notes, in a file of its own: that it began; that it trains, from which step on and in which generation of
workers; each step with its samples before it, and that the step is done after it. A worker takes 2 ms (``--ms``) for
each of its samples, so that a smaller group is slower, as on workers that do not share cores.
"""

import argparse
import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import socket
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import lightning as L
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroDDPStrategy

SAMPLES, INPUTS, LOCAL = 960, 16, 8
RATE, MOMENTUM = 0.01, 0.9
WORKERS = 4


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


class Notes:
    """Notes of this process; each line is in the file before the next thing happens."""

    def __init__(self, folder, slot, life):
        self.file = open(folder / f"notes-{slot}-{life}-{os.getpid()}.jsonl", "w")  # noqa: SIM115
        self.write(created=psutil.Process().create_time())

    def write(self, **note):
        self.file.write(json.dumps({**note, "time": time.monotonic()}) + "\n")
        self.file.flush()


class Orders(threading.Thread):
    """Takes the orders for this process: to read what is not its own, to be slow, to delay or to cut its links."""

    CALLS = ("allreduce", "allgather", "broadcast", "gather", "send", "recv", "barrier")

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.file = folder / f"order-{os.getpid()}"
        self.slow_until = self.delay_until = 0.0
        for name in self.CALLS:
            setattr(dist.ProcessGroup, name, self._delayed(getattr(dist.ProcessGroup, name)))

    def _delayed(self, call):
        def delayed(*args, **kwargs):
            if time.monotonic() < self.delay_until:
                time.sleep(0.02)
            return call(*args, **kwargs)

        return delayed

    def run(self):
        while True:
            time.sleep(0.01)
            with suppress(FileNotFoundError):
                kind, seconds = self.file.read_text().split()
                self.file.unlink()
                getattr(self, kind)(float(seconds))

    def segfault(self, _):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        ctypes.string_at(0)

    def slow(self, seconds):
        self.slow_until = time.monotonic() + seconds

    def delay(self, seconds):
        self.delay_until = time.monotonic() + seconds

    def cut(self, _):
        """Close all connections to the other workers for good, on both sides; the job's store stays in reach."""
        store = int(os.environ["MASTER_PORT"])
        for one in psutil.Process().net_connections("tcp"):
            if one.status == psutil.CONN_ESTABLISHED and store not in (one.laddr.port, one.raddr.port):
                with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


class Fit(L.LightningModule):
    """A model that notes its steps."""

    def __init__(self, notes, orders, seconds_per_sample, last):
        super().__init__()
        self.net = network()
        self.notes, self.orders, self.seconds_per_sample, self.last = notes, orders, seconds_per_sample, last

    @property
    def generation(self):
        """Which group of workers trains: how often it has changed, or been started again by torchrun."""
        roster = getattr(self.trainer.strategy, "_roster", None)
        if roster is not None:
            return roster.generation.number
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def on_train_start(self):
        self.note(start=self.trainer.global_step, world=self.trainer.world_size)

    def note(self, **more):
        self.notes.write(**more, generation=self.generation, rank=self.global_rank)

    def training_step(self, batch, batch_idx):
        x, indices = batch
        mine = indices[: self.trainer.strategy.engine.own_size].tolist()
        self.note(step=self.trainer.global_step, epoch=self.trainer.current_epoch, samples=mine)
        slow = 5 if time.monotonic() < self.orders.slow_until else 1
        time.sleep(self.seconds_per_sample * len(mine) * slow)
        return loss_of(self.net, x)

    def on_train_batch_end(self, *args):
        self.note(done=self.trainer.global_step - 1)

    def on_train_epoch_end(self):
        """End after the epoch that was named two epochs ago or more: all workers know it."""
        with suppress(FileNotFoundError):
            if self.trainer.current_epoch >= int(self.last.read_text()):
                self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)


def fit(folder, seconds_per_sample, saves):
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    environment = os.environ
    slot = environment.get("LIGHTNING_HETERO_SLOT", environment["RANK"])
    life = environment.get("LIGHTNING_HETERO_LIFE", environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    notes, orders = Notes(folder, slot, life), Orders(folder)
    orders.start()
    saving = [ModelCheckpoint(folder / "saved", every_n_train_steps=1, filename="fit", enable_version_counter=False)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(environment["WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment()],
        strategy=HeteroDDPStrategy(report=False),
        max_epochs=-1,
        callbacks=saving if saves else [],
        enable_checkpointing=saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Fit(notes, orders, seconds_per_sample, folder / "last")
    saved = folder / "saved" / "fit.ckpt"
    trainer.fit(model, DataLoader(Numbers(), LOCAL, shuffle=True), ckpt_path=saved if saved.exists() else None)
    end = {"weights": model.net.state_dict(), "steps": trainer.global_step}
    torch.save(end, folder / f"end-{slot}.pt")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ms", type=float, default=2.0, help="of a sample")
    parser.add_argument("--saves", action="store_true", help="save a checkpoint after each step")
    args = parser.parse_args()
    fit(args.folder, args.ms / 1000, args.saves)


if __name__ == "__main__":
    main()
