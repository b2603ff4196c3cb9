"""Workers of different kinds in one job, a GPU here and CPUs there: each takes what it has, and all meet over gloo.

On each machine: ``torchrun --nnodes=2 --nproc_per_node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400
examples/mixed_devices.py``. On one machine without a GPU, every other worker emulates a
slower device.
"""

import os

import lightning as L
import torch
from _model import Classifier, report, train_loader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

FAST = DeviceProfile(q=0.0002, s=0.002, k=0.0004, m=0.002, name="fast")
SLOW = DeviceProfile(q=0.0004, s=0.004, k=0.0008, m=0.004, name="slow")

if __name__ == "__main__":
    on_gpu, machines = torch.cuda.is_available(), int(os.environ.get("GROUP_WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    emulated = (
        [] if on_gpu or machines > 1 else [EmulatedDeviceCallback([(FAST, SLOW)[rank % 2] for rank in range(here)])]
    )
    torch.set_num_threads(1 if emulated else torch.get_num_threads())
    trainer = L.Trainer(
        accelerator="cuda" if on_gpu else "cpu",
        devices=here,
        num_nodes=machines,
        strategy=HeteroDDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        callbacks=emulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader())
    report(trainer)
