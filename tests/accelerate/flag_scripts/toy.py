"""Data and model of the scripts in this folder, in double precision, and how they report."""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loaders(batch_size, samples=70):
    """A training loader that shuffles and an evaluation loader."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples + 21, 4, dtype=torch.float64, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(len(x), 1, dtype=torch.float64, generator=generator)
    train, evaluate = TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:], y[samples:])
    shuffled = DataLoader(train, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(5))
    return shuffled, DataLoader(evaluate, batch_size=4)


def model_and_optimizer():
    """A small network with the same weights everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def report(accelerator, model, **more):
    """Write weights and further numbers to the file that ``REPORT`` names."""
    if accelerator.is_main_process:
        weights = [p.tolist() for p in accelerator.unwrap_model(model).parameters()]
        with open(os.environ["REPORT"], "w") as file:
            json.dump({"weights": weights, **more}, file)
