"""Models with what most models lack, and their training on one process in plain torch."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_hetero.data import PermutationStream

TOTAL, STEPS_AN_EPOCH, WIDTH = 8, 25, 32
KINDS = {
    "shapes": ("scalar", "empty", "tied", "embedding dense", "mixed dtypes", "channels last"),
    "embedding sparse": ("embedding sparse",),
    "unused": ("unused",),
    "changed": ("frozen", "unfrozen", "added"),
    "complex": ("complex",),
}
"""Name of a model, and what it has."""


def points():
    """A regression problem with a category."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOTAL * STEPS_AN_EPOCH, 6, generator=generator, dtype=torch.float64)
    category = torch.randint(0, 12, (len(x), 2), generator=generator)
    return TensorDataset(x, category, x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * category[:, :1] - 1.0)


class Odd(L.LightningModule):
    """A perceptron, and what a kind adds to it."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(1)
        self.has, self.losses = KINDS.get(kind, (kind,)), []
        self.first, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.body = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.extra = None
        if "scalar" in self.has:
            self.scale = nn.Parameter(torch.tensor(0.1))
        if "empty" in self.has:
            self.nothing = nn.Parameter(torch.empty(0, 3))
        if "tied" in self.has:
            self.body[3].weight = self.body[1].weight
        if "embedding dense" in self.has or "embedding sparse" in self.has:
            self.emb = nn.Embedding(12, WIDTH, sparse="embedding sparse" in self.has)
        if "unused" in self.has:
            self.sometimes = nn.Linear(6, 1)
        if "channels last" in self.has:
            self.conv = nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)
            self.out = nn.Linear(16, 1)
        if "complex" in self.has:
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.double()
        if "mixed dtypes" in self.has:
            self.head.float()
        if "frozen" in self.has:
            self.first.requires_grad_(False)

    def grow(self, seed):
        """Another layer."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.extra = nn.Linear(6, 1).double()

    def forward(self, x, category, number):
        h = self.first(x)
        if hasattr(self, "emb"):
            h = h + self.emb(category).sum(1)
        out = self.head(self.body(h).tanh().to(self.head.weight.dtype)).double()
        if "scalar" in self.has:
            out = out * self.scale.exp()
        if "empty" in self.has:
            out = out + self.nothing.sum()
        if "unused" in self.has and number % 2:
            out = out + self.sometimes(x)
        if "channels last" in self.has:
            images = x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1).contiguous(memory_format=torch.channels_last)
            out = out + self.out(self.conv(images).flatten(1))
        if "complex" in self.has:
            out = out + (x * self.phase).sum(1, keepdim=True).abs()
        return out if self.extra is None else out + self.extra(x)

    def training_step(self, batch, batch_idx):
        x, category, y = batch
        loss = nn.functional.mse_loss(self(x, category, batch_idx), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02, momentum=0.5)

    def flat(self):
        """All weights as one vector of float64."""
        parts = [torch.view_as_real(p) if p.is_complex() else p for p in self.parameters()]
        return torch.cat([p.detach().double().flatten() for p in parts]).numpy()


def one_process(kind, steps, change):
    """Weights and losses of one process on the same batches."""
    model, data, order = Odd(kind), points(), None
    if "unfrozen" in model.has:
        model.body.requires_grad_(False)
    optimizer = model.configure_optimizers()
    for step in range(steps):
        epoch, number = divmod(step, STEPS_AN_EPOCH)
        if number == 0:
            order = list(PermutationStream(len(data), shuffle=True, seed=0).indices(epoch))
        if step == change and "unfrozen" in model.has:
            model.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.02})
        if step == change and "added" in model.has:
            model.grow(0)
            optimizer.add_param_group({"params": list(model.extra.parameters())})
        optimizer.zero_grad()
        model.training_step(data[order[number * TOTAL : (number + 1) * TOTAL]], number).backward()
        optimizer.step()
    return model.flat(), model.losses
