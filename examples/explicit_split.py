"""A split that you choose: ``local_batch_sizes``, one per worker. Their sum is the total batch."""

import lightning as L
from _model import Classifier, SlowSecondWorker, report, train_loader

from lightning_hetero import HeteroDDPStrategy

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HeteroDDPStrategy(local_batch_sizes=[170, 86]),
        max_epochs=1,
        callbacks=[SlowSecondWorker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader())
    report(trainer)
