"""A total batch that grows where that pays: two callbacks more, and the module stays as it is.

``GNSCallback`` measures the noise in the gradients. ``AdaptiveBatchCallback`` moves the total batch to the highest
goodput, which is progress per second, and split and learning rate with it.
"""

import lightning as L
import torch
from _model import Classifier, SlowSecondWorker, report, train_loader
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import AdaptiveBatchCallback, GNSCallback

BATCH_SIZE = 16  # per worker on average: training begins with a total of 32


def noisy_data() -> TensorDataset:
    """Points of which half have a random label, so that one sample says little and large batches pay."""
    x, y = train_loader().dataset.tensors
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(len(y), generator=generator) < 0.5
    return TensorDataset(x, torch.where(wrong, torch.randint(10, (len(y),), generator=generator), y))


if __name__ == "__main__":
    adaptive = AdaptiveBatchCallback(max_total_batch_size=256)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="hetero_ddp",
        max_epochs=3,
        callbacks=[SlowSecondWorker(), GNSCallback(), adaptive],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(noisy_data(), batch_size=BATCH_SIZE, shuffle=True))
    report(trainer)
    if trainer.is_global_zero:
        totals = dict.fromkeys(entry.plan.total_batch_size for entry in trainer.strategy.plan_history)
        print("totals", " -> ".join(map(str, totals)))
        print(f"{trainer.global_step} steps, worth {adaptive.scale_invariant_steps:.0f} at the initial total")
