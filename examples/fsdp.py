"""A model that is sharded over the workers (FSDP2), on unequal batches: ``strategy="hetero_fsdp"``.

Each worker holds half of the parameters, of the gradients and of the optimizer's state. It takes the share of the batch
that suits its speed, but no more samples than its memory holds.
"""

import lightning as L
from _model import Classifier, SlowSecondWorker, report, train_loader
from torch.utils.data import DataLoader

from lightning_hetero import HeteroFSDPStrategy

BATCH = 512  # per worker on average; a larger one, because sharded parameters are gathered in every step

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HeteroFSDPStrategy(max_local_batch_sizes=[800, 1024]),
        max_epochs=2,
        callbacks=[SlowSecondWorker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(train_loader(20 * 2 * BATCH).dataset, BATCH, shuffle=True))
    report(trainer)
