"""A training that outlives its workers: it saves as it goes and, whenever torchrun starts it, goes on from there.

Start it on every machine with the same command; machines may come and go between one and three::

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:3 --nproc_per_node=1 --max-restarts=10 \\
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --rdzv-id=my-run examples/torchrun.py FOLDER

What was learned of each machine's speed is in the checkpoint, by hardware, so that the split is right at once.
"""

import os
import sys
from pathlib import Path

import lightning as L
from _model import Classifier, SlowSecondWorker, report, train_loader
from lightning.pytorch.callbacks import ModelCheckpoint

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy="hetero_ddp",
        max_epochs=2,
        callbacks=[SlowSecondWorker(), ModelCheckpoint(folder, save_last=True, every_n_train_steps=10)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    trainer.fit(Classifier(), train_loader(), ckpt_path=last if last.exists() else None)
    report(trainer)
