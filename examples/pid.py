"""Another policy: equalise compute times by proportional control, with no model of time (dynamic batching).

A policy is a callback. The one given here takes the place of the default ``PerfModelCallback``.
"""

import lightning as L
from _model import Classifier, SlowSecondWorker, report, train_loader

from lightning_hetero import DynamicBatchPIDCallback

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="hetero_ddp",
        max_epochs=2,
        callbacks=[SlowSecondWorker(), DynamicBatchPIDCallback(dead_band=0.1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader())
    report(trainer)
