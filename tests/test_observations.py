"""What a step is made of, through every front end: what each part takes is given, in counted time, and found again."""

from dataclasses import dataclass

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from tests.counted import CountedTime
from tests.helpers import Points, run_ranks, trainer_of

DATA, FORWARD, LAYER, UPDATE = 1.0, 2.0, 4.0, 8.0
SETTINGS = {"local_batch_sizes": (5, 5), "replan": 6}
ONE_EACH = 1e-4
"""MB of a bucket, less than a layer has."""


class Counted(CountedTime):
    """Counts exactly what was spent; gradients travel in no time to speak of."""

    def __init__(self, rank):
        super().__init__(rank, rate=1e12)

    def spend(self, seconds):
        self.now += seconds


class Network(nn.Module):
    """Two layers, each a bucket of its own."""

    def __init__(self, counted):
        super().__init__()
        torch.manual_seed(1)
        self.counted = counted
        self.first, self.second = (nn.Linear(5, 5, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        self.counted.spend(FORWARD)
        for layer in (self.first, self.second):
            x = layer(x)
            x.register_hook(lambda _: self.counted.spend(LAYER))
        return x


class Update(torch.optim.SGD):
    """SGD that takes its time, after what its closure takes."""

    def __init__(self, parameters, counted):
        super().__init__(parameters, lr=1e-3)
        self.counted = counted

    def step(self, closure=None):
        result = super().step(closure)
        self.counted.spend(UPDATE)
        return result


def loader(counted):
    def collate(rows):
        counted.spend(DATA)
        return default_collate(rows)

    return DataLoader(Points(160), 5, shuffle=True, collate_fn=collate)


class Automatic(L.LightningModule):
    def __init__(self, counted):
        super().__init__()
        self.counted, self.network = counted, Network(counted)

    def training_step(self, batch, batch_idx):
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self):
        return Update(self.parameters(), self.counted)


class Manual(Automatic):
    """Two optimizers, each with a forward and a backward pass of its own."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [Update(layer.parameters(), self.counted) for layer in self.network.children()]


def _lightning(rank):
    """One optimizer, a window of two batches, and two optimizers, one training after another."""
    from lightning_hetero import HeteroDDPStrategy

    counted, seen = Counted(rank), []
    for module, accumulate in ((Automatic, 1), (Automatic, 2), (Manual, 1)):
        strategy = HeteroDDPStrategy(**SETTINGS, bucket_cap_mb=ONE_EACH)
        trainer = trainer_of(strategy, 2, max_epochs=1, accumulate_grad_batches=accumulate)
        trainer.fit(module(counted), loader(counted))
        seen.append(strategy.observations())
    return seen


def _fabric(rank):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    counted = Counted(rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HeteroDDPStrategy(**SETTINGS, bucket_cap_mb=ONE_EACH))
    fabric.launch()
    network = Network(counted)
    network, optimizer = fabric.setup(network, Update(network.parameters(), counted))
    for x, *_ in fabric.setup_dataloaders(loader(counted)):
        fabric.backward(network(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.teardown()
    return [fabric.strategy.observations()]


def _accelerate(rank):
    from accelerate.utils import DistributedDataParallelKwargs

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    counted = Counted(rank)
    ddp = DistributedDataParallelKwargs(bucket_cap_mb=ONE_EACH)
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin=HeteroPlugin(**SETTINGS), kwargs_handlers=[ddp])
    network = Network(counted)
    network, optimizer, batches = accelerator.prepare(network, Update(network.parameters(), counted), loader(counted))
    for x, *_ in batches:
        accelerator.backward(network(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return [accelerator.observations()]


@dataclass(frozen=True)
class Training:
    """How often a step does what: ``passes`` and ``updates`` of each batch, ``batches`` of a step."""

    passes: int = 1
    updates: float = 1.0
    batches: int = 1

    def check(self, seen):
        parts = {
            "data_wait": DATA,
            "forward": FORWARD * self.passes,
            "backward": 2 * LAYER * self.passes,
            "optimizer": UPDATE * self.updates,
            "first_bucket": LAYER,
        }
        for name, seconds in parts.items():
            np.testing.assert_allclose(getattr(seen, name), np.full((seen.num_steps, 2), seconds), atol=0.01)
        ends = np.broadcast_to([LAYER, 2 * LAYER], (seen.num_steps, 2, 2))
        np.testing.assert_allclose(seen.bucket_ends, ends, atol=0.01)
        assert (seen.first_bucket < seen.bucket_ends[:, :, 0]).all()
        step = self.batches * (DATA + (FORWARD + 2 * LAYER) * self.passes + UPDATE * self.updates)
        np.testing.assert_allclose(seen.step_time[1:], step, atol=0.01)


@pytest.mark.parametrize(
    ("train", "trainings"),
    [
        (_lightning, (Training(), Training(updates=0.5, batches=2), Training(passes=2, updates=2))),
        (_fabric, (Training(),)),
        (_accelerate, (Training(),)),
    ],
    ids=["lightning", "fabric", "accelerate"],
)
def test_each_part_of_a_step_is_found_in_its_own_field(train, trainings):
    """Of an accumulation window of two batches, each has one half of the only update."""
    first, second = run_ranks(train, 2)
    for training, seen, other in zip(trainings, first, second, strict=True):
        assert seen.num_steps >= 3
        training.check(seen)
        training.check(other)
