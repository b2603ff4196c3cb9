"""A thin link: with ``staleness=1``, gradients for which every step would wait arrive one step later."""

import time

import lightning as L
from _model import Classifier, report, train_loader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import ThinLink


class Watch(L.Callback):
    """Makes the link thin while it trains, 300 MB/s in place of memory's rate, and times the second half."""

    def on_train_start(self, trainer, pl_module):
        self.link = ThinLink(300e6, trainer.world_size).start()
        self.marks = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.marks.append(time.perf_counter())

    def on_train_end(self, trainer, pl_module):
        self.link.stop()
        half = len(self.marks) // 2
        step = (self.marks[-1] - self.marks[half]) / (len(self.marks) - 1 - half)
        staleness = trainer.strategy.engine.hook_state.staleness
        share = 0.0 if staleness is None else staleness.stale_share
        if trainer.is_global_zero:
            print(f"{1e3 * step:.1f} ms a step, {share:.0%} of the gradient one step late")


if __name__ == "__main__":
    for staleness in (0, 1):
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=HeteroDDPStrategy(policy="even", staleness=staleness, bucket_cap_mb=1),
            max_epochs=2,
            callbacks=[Watch()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), train_loader())
    report(trainer)
