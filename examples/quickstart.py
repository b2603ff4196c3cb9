"""A complete training on two unequal workers, in one file: ``python quickstart.py ddp``, then ``... hetero_ddp``.

The workers are two processes on the CPU. `EmulatedDeviceCallback` makes the second one take three times as long per
sample as the first. Leave it out on real devices.
"""

import sys
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        self.start = time.perf_counter()

    def on_train_end(self):
        seconds = time.perf_counter() - self.start
        self.print(f"{self.trainer.global_step} steps of 80 samples in {seconds:.1f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    y = torch.randint(4, (4800,))
    x = torch.randn(4, 20)[y] + torch.randn(4800, 20)
    loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)  # 40 per worker on average

    fast = DeviceProfile(q=0.0005, s=0.004, k=0.001, m=0.006, name="fast")
    slow = DeviceProfile(q=0.0015, s=0.004, k=0.003, m=0.006, name="slow")
    trainer = L.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[EmulatedDeviceCallback([fast, slow])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
