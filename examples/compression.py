"""Send one block in a hundred: gradients for a thin link between two workers, and an optimizer that touches as little.

What is not sent stays in a residual and is sent later. Compare `hetero/bytes_sent` with what plain sums would send.
"""

import lightning as L
import torch
from _model import Classifier, train_loader

from lightning_hetero import BlockTopK, HeteroDDPStrategy


class MomentumClassifier(Classifier):
    """The same module with momentum; the strategy lets torch's own optimizer write only the blocks that were sent."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HeteroDDPStrategy(policy="even", compression=BlockTopK(density=0.01), sparse_optimizer=True),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = MomentumClassifier()
    trainer.fit(model, train_loader())
    report = trainer.strategy.engine.compression.take_report()
    if trainer.is_global_zero and report is not None:
        dense = 4 * sum(p.numel() for p in model.parameters())  # what a ring of two sends
        sent = report.sent / report.steps
        print(f"sent {sent / 1e3:.1f} kB a step, {dense / sent:.0f} times less than {dense / 1e3:.1f} kB")
