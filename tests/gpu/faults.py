"""A rank fails while another waits for it: the other one ends in time and says who it was."""

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context

import torch
from torch.utils.data import DataLoader

from tests.gpu.common import place
from tests.helpers import Points, Regressor, trainer_of
from tests.ranks import free_port

AT = 5
PATIENCE, WALL = 20.0, 90.0
"""Timeout of the collectives, and the seconds from its start within which the other rank has to end."""
LOST, QUIET = 15.0, 8.0
"""Seconds without a sign of life, and without progress, after which a rank is named: by default a minute each."""


def _spin():
    while True:
        pass


def _raise():
    raise ZeroDivisionError("a bug of the user's")


KINDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": _raise,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loops": _spin,
}


def _train(rank, port, kind, backend, device, patience, folder):
    """A process that trains, and fails if it is rank 1."""
    from lightning_hetero import HeteroDDPStrategy
    from lightning_hetero.comm.failures import rank_monitor

    rank_monitor.SETTINGS = replace(rank_monitor.SETTINGS, period_s=1.0, lost_s=LOST, quiet_s=QUIET)
    with open(folder / f"fault {kind} {rank}.log", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")

    class Fails(Regressor):
        def training_step(self, batch, batch_idx):
            if rank == 1 and batch_idx == AT:
                KINDS[kind]()
            return super().training_step(batch, batch_idx)

    strategy = HeteroDDPStrategy(process_group_backend=backend, timeout=timedelta(seconds=patience), report=False)
    trainer = trainer_of(strategy, 1, max_epochs=1, **place(rank, 2, device))
    trainer.fit(Fails(dtype=torch.float32), DataLoader(Points(4000, dtype=torch.float32), 2))


def faults(figures, device):
    """All kinds at once, each a job of its own: what takes long is to wait for a timeout."""
    real, fork, folder = device.type == "cuda", get_context("fork"), figures.folder
    two = real and figures.known.get("machine", {}).get("ranks over NCCL") == 2
    backend, jobs = "nccl" if two else "gloo", {}
    figures["backend"] = backend
    for kind in KINDS:
        given = free_port(), kind, backend, device, PATIENCE, folder
        jobs[kind] = [fork.Process(target=_train, args=(rank, *given)) for rank in range(2)]
    processes = [process for pair in jobs.values() for process in pair]
    for process in processes:
        process.start()
    end = time.monotonic() + WALL
    for kind, (other, _) in jobs.items():
        other.join(max(end - time.monotonic(), 0.0))
        said = (folder / f"fault {kind} 0.log").read_text(errors="replace")
        figures[f"{kind}: the other rank has ended"] = not other.is_alive()
        figures.must(not other.is_alive(), f"{kind}: the other rank has not ended after {WALL:.0f} s")
        figures.must("rank 1" in said, f"{kind}: rank 1 is not named")
    for process in processes:
        process.kill()  # one that is stopped, too
        process.join()
