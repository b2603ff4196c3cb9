"""Small models and data to train on ranks, and what a test asks of such a training."""

import logging

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def collected():
    """Our log lines from here on, in the order in which this process says them."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning_hetero").addHandler(handler)
    return lines


class Points(Dataset):
    """Rows of a random regression problem that know their index: ``(x, y, index)``."""

    def __init__(self, n=64, features=5, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, features, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(n, 1, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


class Regressor(L.LightningModule):
    """Small network; remembers which samples it saw and its gradients before every optimizer step."""

    def __init__(self, reduction="mean", features=5, lr=0.05, momentum=0.9, dtype=torch.float64, loss_scale=1.0):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
        self.reduction, self.lr, self.momentum, self.loss_scale = reduction, lr, momentum, loss_scale
        self.seen, self.grads, self.weights = [], [], []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y, _ = batch
        return nn.functional.mse_loss(self(x), y, reduction=self.reduction) * self.loss_scale

    def training_step(self, batch, batch_idx):
        own = getattr(getattr(self.trainer.strategy, "engine", None), "own_size", None)
        indices = batch[2].tolist()
        self.seen.append((self.trainer.current_epoch, batch_idx, [] if own == 0 else indices))
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.grads.append(
            torch.cat([p.grad.detach().flatten().clone() for p in self.parameters() if p.grad is not None])
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def flat(self):
        return torch.cat([p.detach().flatten() for p in self.parameters()]).numpy()


def trainer_of(strategy, world_size, **kwargs):
    settings = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, **{**settings, **kwargs})


def fit(rank, strategy, world_size, batch_size, model=None, dataset=None, ckpt_path=None, loader_kwargs=None, **kwargs):
    """Fit on this rank; a strategy may be a name, a dict of ``HeteroDDPStrategy`` arguments, or an object."""
    from lightning_hetero import HeteroDDPStrategy

    if isinstance(strategy, dict):
        strategy = HeteroDDPStrategy(**strategy)
    model = Regressor() if model is None else model
    dataset = Points() if dataset is None else dataset
    loader = DataLoader(dataset, batch_size, shuffle=True, **(loader_kwargs or {}))
    trainer = trainer_of(strategy, world_size, **kwargs)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return {
        "weights": model.flat(),
        "grads": np.stack([g.numpy() for g in model.grads]) if model.grads else np.zeros((0, 0)),
        "seen": model.seen,
        "history": [(e.epoch, e.step, e.plan.local_batch_sizes) for e in getattr(trainer.strategy, "plan_history", ())],
        "rows": [e.rows for e in getattr(trainer.strategy, "plan_history", ())],
        "steps": trainer.global_step,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def covered(results, epoch):
    """All sample indices that count, over all ranks, of one epoch."""
    return sorted(i for r in results for e, _, indices in r["seen"] if e == epoch for i in indices)


def raised(train):
    """What a training raised, as text. Its process stays until the other ranks have come to their own errors."""
    try:
        train()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing"
