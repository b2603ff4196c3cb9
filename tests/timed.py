"""Models whose every part takes a given time, and their training through each front end; for counted time.

``time.spend(seconds)`` is what a part calls: on the host of :mod:`tests.counted`, or on a device that works behind it,
:mod:`tests.timing.fake_device`.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import Points, trainer_of

FORWARD, LAYER, UPDATE = 2.0, 4.0, 8.0
SETTINGS = {"local_batch_sizes": (5, 5), "replan": 4}
ONE_EACH = 1e-4
"""MB of a bucket, less than a layer has."""


class Network(nn.Module):
    """Two layers, each a bucket of its own; the forward pass may take longer on some rank."""

    def __init__(self, time, more=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.time, self.more = time, more
        self.first, self.second = (nn.Linear(5, 5, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        self.time.spend(FORWARD + self.more)
        for layer in (self.first, self.second):
            x = layer(x)
            x.register_hook(lambda _: self.time.spend(LAYER))
        return x


class Update(torch.optim.SGD):
    """SGD that takes its time, after what its closure takes."""

    def __init__(self, parameters, time):
        super().__init__(parameters, lr=1e-3)
        self.time = time

    def step(self, closure=None):
        result = super().step(closure)
        self.time.spend(UPDATE)
        self.time.updated()
        return result


def loader(collate):
    return DataLoader(Points(180), 5, shuffle=True, collate_fn=collate)


class Automatic(L.LightningModule):
    """Waits for the other ranks in the middle of a step, if it is to log."""

    def __init__(self, time, more=0.0, waits=False):
        super().__init__()
        self.time, self.waits, self.network = time, waits, Network(time, more)

    def training_step(self, batch, batch_idx):
        loss = self.network(batch[0]).square().mean()
        if self.waits:
            self.log("loss", loss.detach(), on_step=True, on_epoch=False, sync_dist=True, batch_size=5)
        return loss

    def configure_optimizers(self):
        return Update(self.parameters(), self.time)


class Manual(Automatic):
    """Two optimizers, each with a forward and a backward pass of its own."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [Update(layer.parameters(), self.time) for layer in self.network.children()]


def lightning(time, collate, *, module=Automatic, accumulate=1, more=0.0, waits=False, **settings):
    from lightning_hetero import HeteroDDPStrategy

    strategy = HeteroDDPStrategy(**SETTINGS, **settings, bucket_cap_mb=ONE_EACH)
    trainer = trainer_of(strategy, 2, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module(time, more, waits), loader(collate))
    return strategy.observations()


def fabric(time, collate, *, accumulate=1, more=0.0, waits=False, **settings):
    from lightning.fabric import Fabric

    from lightning_hetero.strategies.fabric_ddp import HeteroDDPStrategy

    strategy = HeteroDDPStrategy(**SETTINGS, **settings, bucket_cap_mb=ONE_EACH)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    network = Network(time, more)
    network, optimizer = fabric.setup(network, Update(network.parameters(), time))
    for i, (x, *_) in enumerate(fabric.setup_dataloaders(loader(collate))):
        final = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(network, enabled=not final):
            loss = network(x).square().mean()
            if waits:
                fabric.barrier()
                fabric.all_reduce(loss.detach())
            fabric.backward(loss)
        if final:
            optimizer.step()
            optimizer.zero_grad()
    fabric.strategy.teardown()
    return fabric.strategy.observations()


def accelerate(time, collate, *, accumulate=1, more=0.0, waits=False, last=True, **settings):
    """``last``: no further training follows in this process."""
    from accelerate.utils import DistributedDataParallelKwargs

    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    accelerator = HeteroAccelerator(
        cpu=True,
        hetero_plugin=HeteroPlugin(**SETTINGS, **settings),
        gradient_accumulation_steps=accumulate,
        kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=ONE_EACH)],
    )
    network = Network(time, more)
    network, optimizer, batches = accelerator.prepare(network, Update(network.parameters(), time), loader(collate))
    for x, *_ in batches:
        with accelerator.accumulate(network):
            loss = network(x).square().mean()
            if waits:
                accelerator.wait_for_everyone()
                accelerator.reduce(loss.detach())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if last:
        accelerator.end_training()
    return accelerator.observations()
