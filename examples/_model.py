"""What the examples share, so that each of them is the small difference: a model, its data, and a slow worker."""

import contextlib
import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.simulate import Throttle

torch.set_num_threads(1)  # each process is one worker with one core

# The examples print one line each; Lightning's advice for real trainings would hide it.
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*does not have many workers")
warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")

BATCH_SIZE = 128  # per worker on average, as under plain DDP


class Classifier(L.LightningModule):
    """An ordinary module: nothing in it knows of unequal workers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train_loader(num_samples: int = 24 * 2 * BATCH_SIZE) -> DataLoader:
    """Ten clusters of points, shuffled."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (num_samples,), generator=generator)
    centres = torch.randn(10, 256, generator=generator)
    x = centres[y] + torch.randn(num_samples, 256, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)


class SlowSecondWorker(L.Callback):
    """Makes the second process compute at half speed, in place of a slow machine; leave it out on real ones."""

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self._throttle: Throttle | None = None

    def on_train_start(self, trainer, pl_module):
        if trainer.local_rank == 1:
            self._throttle = Throttle(self.share).start()

    def on_train_end(self, trainer, pl_module):
        if self._throttle is not None:
            self._throttle.stop()


@contextlib.contextmanager
def slow_second_worker(rank: int, share: float = 0.5):
    """The same for a training loop of one's own."""
    throttle = Throttle(share).start() if rank == 1 else None
    try:
        yield
    finally:
        if throttle is not None:
            throttle.stop()


def report_plans(history) -> None:
    """Print plans."""
    for entry in history:
        sizes = "/".join(map(str, entry.plan.local_batch_sizes))
        print(f"split {sizes} from epoch {entry.epoch} step {entry.step}: {entry.reason}", flush=True)


def report(trainer: L.Trainer) -> None:
    """Print the plans of the run, on one process only."""
    if trainer.is_global_zero:
        report_plans(trainer.strategy.plan_history)
