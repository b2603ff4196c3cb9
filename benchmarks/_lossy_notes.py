"""What the workers of a job that suffers faults do beside their training: they note it, and take orders to fail.

Each process notes, in a file of its own: that it began; that it trains, from which step on and in which generation of
workers; each step with its samples before it, and that the step is done after it.
"""

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

import lightning as L
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from lightning_hetero import HeteroDDPStrategy

ATTEMPT = 1000 * int(os.environ.get("ATTEMPT", "0"))
"""Added to the numbers of groups and of lives by a job that was started again as a whole: its keepers count anew."""


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


class Noted(L.LightningModule):
    """A model that notes its steps.

    Args:
        folder: where the notes are, and the order to end.
    """

    def __init__(self, folder):
        super().__init__()
        self.notes, self.orders, self.last = Notes(folder, *slot_and_life()), Orders(folder), folder / "last"
        self.orders.start()

    @property
    def generation(self):
        """Which group of workers trains: how often it has changed, or been started again by torchrun."""
        roster = getattr(self.trainer.strategy, "_roster", None)
        if roster is not None:
            return ATTEMPT + roster.generation.number
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def on_train_start(self):
        self.note(start=self.trainer.global_step, world=self.trainer.world_size)

    def note(self, **more):
        self.notes.write(**more, generation=self.generation, rank=self.global_rank)

    def note_step(self, indices):
        """Note the samples of this rank's next step, and return how many they are."""
        mine = indices[: self.trainer.strategy.engine.own_size].tolist()
        self.note(step=self.trainer.global_step, epoch=self.trainer.current_epoch, samples=mine)
        return len(mine)

    def on_train_batch_end(self, *args):
        self.note(done=self.trainer.global_step - 1)

    def on_train_epoch_end(self):
        """End after the epoch that was named two epochs ago or more: all workers know it."""
        with suppress(FileNotFoundError):
            if self.trainer.current_epoch >= int(self.last.read_text()):
                self.trainer.should_stop = True


def slot_and_life():
    """Return the slot of this worker, and how often it was started before."""
    environment = os.environ
    slot = environment.get("LIGHTNING_HETERO_SLOT", environment.get("RANK"))
    life = environment.get("LIGHTNING_HETERO_LIFE", environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return slot, ATTEMPT + int(life)


def quiet_trainer(callbacks=()):
    """Return a trainer of ``hetero_ddp`` that trains until it is told to end, in this process of torchrun."""
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment()],
        strategy=HeteroDDPStrategy(report=False),
        max_epochs=-1,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def moments(optimizer):
    """Return what an optimizer keeps of each parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{number} {name}": value for number, kept in state.items() for name, value in kept.items()}


def train_and_save(trainer, model, loader, folder, ckpt_path=None):
    """Train, and leave the weights, what the optimizer keeps, and the number of steps at the end."""
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    weights = model.net.state_dict() | moments(trainer.optimizers[0])
    end = {"weights": weights, "steps": trainer.global_step}
    torch.save(end, folder / f"end-{slot_and_life()[0]}.pt")
