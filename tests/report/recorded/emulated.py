"""Train on sixteen emulated devices of three kinds, for ``emulated.jsonl``: about a minute on two cores.

    python tests/report/recorded/emulated.py

Moves the record of the run beside this file. That of the demo (``demo.jsonl``) is made by

    python examples/_demo_train.py --strategy hetero_ddp --quick --out build/demo.json --record build/demo
"""

import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_hetero import HeteroDDPStrategy
from lightning_hetero.simulate import DeviceProfile, EmulatedDeviceCallback

KINDS = (("A100", 1.0, 4), ("V100", 0.5, 4), ("RTX6000", 0.3, 8))

if __name__ == "__main__":
    devices = [
        DeviceProfile(q=0.002 / speed, s=0.02 / speed, k=0.004 / speed, m=0.02 / speed, name=name)
        for name, speed, count in KINDS
        for _ in range(count)
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=len(devices),
        strategy=HeteroDDPStrategy(report="build/emulated"),
        max_epochs=2,
        callbacks=[EmulatedDeviceCallback(devices)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 512 * 25), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        shutil.move("build/emulated/hetero_run.jsonl", Path(__file__).with_suffix(".jsonl"))
