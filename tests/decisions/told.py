"""Ranks whose time is told, not measured: what a step takes is given; and trainings repeated at the rates they used."""

import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.helpers import Regressor

TICK = 2.0**-12
"""Ticks add up exactly."""
LR = 0.02


class Told:
    """A clock that moves when it is told to; computing of a batch is spent in its loss."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


@contextmanager
def told_time():
    """The clock of this process while the context lasts; our own bookkeeping takes no time."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Told()
        patch.setattr(time, "perf_counter", clock)
        patch.setattr(time, "thread_time", lambda: 0.0)
        yield clock


def micro_batches(results):
    """Samples of all ranks in each micro-batch, in order, with their epoch."""
    for row in zip(*(r["seen"] for r in results), strict=True):
        yield row[0][0], [i for _, _, indices in row for i in indices]


def replay(results, data):
    """Weights and gradients of one process that trains on the same global batches with the same learning rates."""
    model, first = Regressor(lr=LR), results[0]
    groups = [{"params": model.net[:2].parameters()}, {"params": model.net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    window, grads, used, latter = [], [], iter(first["used"]), iter(first.get("latter", first["used"]))
    batches = list(micro_batches(results))
    for position, ((epoch, indices), count) in enumerate(zip(batches, first["windows"], strict=True)):
        window.append(indices)
        last_of_epoch = position + 1 == len(batches) or batches[position + 1][0] != epoch
        if len(window) < count and not last_of_epoch:
            continue
        optimizer.zero_grad()
        for part in window:
            (model.loss((data.x[part], data.y[part], None)) / count).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = next(used), next(latter)
        optimizer.step()
        window = []
    assert next(used, None) is None
    return model.flat(), np.stack(grads)
