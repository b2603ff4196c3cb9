"""Run every Python block of README and docs as a reader would, a page after another; say which ones fail.

    python tests/page_blocks.py FOLDER

The blocks of a page share their names. What a page takes for granted (its reader's model, data or records) comes from
``GIVEN``. A GPU is a CPU here, and the hub's data set a small one. The process works in a folder of its own.
"""

import os
import re
import sys
import traceback
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)

MODEL = """
import lightning as L
import torch
from torch.utils.data import DataLoader
from lightning_hetero import HeteroDDPStrategy
"""
GIVEN = {
    "faults": """
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
fabric = Fabric(accelerator="cpu", devices=1, strategy="hetero_ddp")
fabric.launch()
model = nn.Linear(5, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
loader = fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))
""",
    "lengths": f"{MODEL}\ndef count_tokens(batch): return batch['input_ids'].numel()\n",
    "loaders": f"""{MODEL}
from lightning import Trainer as Full
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
class Both(BoringModel):
    def training_step(self, batch, batch_idx): return super().training_step(batch["labelled"], batch_idx)
class Batch: join = staticmethod(torch.cat)
class Buckets(torch.utils.data.BatchSampler):
    def __init__(self, lengths, tokens): super().__init__(range(len(lengths)), max(tokens // max(lengths), 1), False)
def Trainer(strategy, devices): return Full(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False)
dataset, a, b = (RandomDataset(32, 64) for _ in range(3))
model, lengths = Both(), [512] * 64
""",
    "report": """
from tests.report.runs import simulated, written
from pathlib import Path
for version in (0, 1): written(simulated(rounds=3, steps=3, straggler=False), Path(f"lightning_logs/version_{version}"))
""",
    "streams": """
import datasets
import torch
from lightning_hetero.config import HeteroConfig
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.session import HeteroSession
rows = datasets.Dataset.from_dict({"text": ["a", "b"] * 32}).to_iterable_dataset(num_shards=2)
datasets.load_dataset = lambda *names, **settings: rows
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
session = HeteroSession(HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"), local_rank=0))
""",
}
"""Source that runs before the blocks of a page."""


def main(folder):
    """Run all blocks; return how many failed."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    failed = count = 0
    for page in PAGES:
        if torch.distributed.is_initialized():  # by another page
            torch.distributed.destroy_process_group()
        names = {"__name__": page.stem}
        exec(GIVEN.get(page.stem, ""), names)
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1] != "python":
                continue
            count += 1
            where = f"{page.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}"
            try:
                exec(compile(match[2].replace('accelerator="gpu"', 'accelerator="cpu"'), where, "exec"), names)
            except Exception:
                failed += 1
                print(f"{where} fails:\n{traceback.format_exc()}")
    print(f"{count} blocks ran, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))
