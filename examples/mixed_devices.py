"""Workers of different kinds in one job, a GPU here and CPUs there: each takes what it has, and all meet over gloo.

On each machine: ``torchrun --nnodes=2 --nproc_per_node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400
examples/mixed_devices.py``. Without a GPU the workers differ in threads only.
"""

import os

import lightning as L
import torch
from _model import Classifier, SlowSecondWorker, report, train_loader

from lightning_hetero import HeteroDDPStrategy

if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1 if os.environ.get("RANK", "0") != "0" else 2)
    trainer = L.Trainer(
        accelerator="cuda" if on_gpu else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=HeteroDDPStrategy(process_group_backend="gloo"),
        max_epochs=4,
        callbacks=[] if on_gpu else [SlowSecondWorker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader())
    report(trainer)
