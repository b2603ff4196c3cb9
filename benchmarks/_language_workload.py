"""A small transformer that learns the characters of Python's manual, for the benchmark of convergence and its test."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RISE, EVALUATIONS = 100, 20


def characters():
    """The text as numbers, nine tenths to train on and the rest, and how many characters there are."""
    codes = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    used, numbers = codes.unique(return_inverse=True)
    cut = int(0.9 * len(numbers))
    return numbers[:cut], numbers[cut:], len(used)


class Layer(nn.Module):
    """Causal attention and a perceptron, each behind a layer norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class LanguageModel(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, vocabulary, width, layers, context, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.tokens(x) + self.places.weight[: x.shape[1]])))


def windows(text, number, context, seed):
    """Sequences from random places, each with the character that follows it."""
    begins = torch.randint(len(text) - context - 1, (number, 1), generator=torch.Generator().manual_seed(seed))
    return text[begins + torch.arange(context + 1)]


def loss_of(model, rows):
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rate_at(step, steps):
    """Share of the learning rate: up over ``RISE`` steps, down in a line to 0."""
    return min(1.0, (step + 1) / RISE) * (1 - step / steps)


def adamw(parameters, rate):
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99))


def sgd(parameters, rate):
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def train(fabric, rate, steps, seed, *, sequences, optimizer=adamw, width=64, layers=2, context=32):
    """Train on this rank; validation losses as ``[samples, loss]``, the last one at the end.

    Args:
        fabric: launched.
        rate: greatest learning rate.
        steps: of the optimizer.
        seed: of weights and samples.
        sequences: of all workers together in a step.
        optimizer: of the parameters, at a learning rate.
        width: of the model.
        layers: of the model.
        context: characters of a sequence.
    """
    text, held_out, vocabulary = characters()
    torch.manual_seed(seed)
    model = LanguageModel(vocabulary, width, layers, context)
    model, optimizer = fabric.setup(model, optimizer(model.parameters(), rate))
    data = TensorDataset(windows(text, steps * sequences, context, seed))
    loader = fabric.setup_dataloaders(DataLoader(data, sequences // fabric.world_size, shuffle=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    fixed, curve, every = windows(held_out, 64, context, 0), [], max(1, steps // EVALUATIONS)
    for step, (rows,) in enumerate(loader, start=1):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, rows))
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            with torch.no_grad():
                curve.append([step * sequences, float(loss_of(model.module, fixed))])
    fabric.strategy.teardown()
    return curve
