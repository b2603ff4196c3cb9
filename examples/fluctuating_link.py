"""A link that gets thin while training: `TTACallback` sends less of the gradient then, and more again later."""

import lightning as L
from _model import BATCH_SIZE, Classifier, report, train_loader

from lightning_hetero import BlockTopK, HeteroDDPStrategy, TTACallback
from lightning_hetero.simulate import ThinLink


class Weather(L.Callback):
    """Makes the link thin in the second epoch of three, and says what share of the gradient each epoch ended with."""

    def on_train_start(self, trainer, pl_module):
        self.link = ThinLink(1e9, trainer.world_size).start()

    def on_train_epoch_start(self, trainer, pl_module):
        self.link.rate = 1e6 if trainer.current_epoch == 1 else 1e9

    def on_train_epoch_end(self, trainer, pl_module):
        density = trainer.strategy.engine.compression.averager.density
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}: {self.link.rate / 1e6:g} MB/s, density {density:.3g}")

    def on_train_end(self, trainer, pl_module):
        self.link.stop()


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HeteroDDPStrategy(compression=BlockTopK(density=0.1), replan=8),
        max_epochs=3,
        callbacks=[TTACallback(), Weather()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader(48 * 2 * BATCH_SIZE))
    report(trainer)
