"""An ordinary training on unequal workers: only ``strategy="hetero_ddp"`` is new.

The split starts equal, follows the measured speed after a few steps, and is the optimum of the learned time model from
then on. ``import torch`` makes the strategy's name known.
"""

import lightning as L
from _model import Classifier, SlowSecondWorker, report, train_loader

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="hetero_ddp",
        max_epochs=2,
        callbacks=[SlowSecondWorker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader())
    report(trainer)
