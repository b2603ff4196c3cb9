"""A model for `tests/strategies` and for `tests/comm/compressors/interpreted.py`, to be removed with those.

The tests of the hook are in `tests/gradients`.
"""

import torch
from torch import nn

STEPS, WIDTH = 3, 600  # wider than the megabyte of DDP's first bucket
TINY = 1e-4  # MB: one bucket for each parameter that does not fit into the first


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batches(rank):
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(STEPS)]


def loss_of(model, x):
    return model(x).square().mean()
