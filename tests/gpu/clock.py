"""Times of a step on a GPU whose work is known: by CUDA events, behind the host's back, for Lightning and Accelerate.

A step takes 30 ms forwards, 60 backwards and 10 in the optimizer; a worker process makes a batch in 5, 90 or 150 ms. So
the loader is hidden behind the device in the first two cases, and exposed by 50 ms in the third.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.gpu.common import GPU, Busy, busy, pytest_passes, ranks
from tests.gpu.outcome import require

FORWARD, BACKWARD, UPDATE = 0.03, 0.06, 0.01
STEP = FORWARD + BACKWARD + UPDATE
LOADS = (0.005, 0.09, 0.15)
STEPS, FROM = 34, 10
FIELDS = ("data_wait", "forward", "backward", "optimizer")


class Slow(Dataset):
    """Rows that take a while to load; four make a batch."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, i):
        time.sleep(self.seconds / 4)
        return torch.randn(8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return Busy.apply(self.layer(x), FORWARD, BACKWARD).square().mean()


class Update(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        busy(GPU, UPDATE)
        return result


class Wall:
    """True seconds of a step: the device is waited for at two moments only."""

    def __init__(self):
        self.steps, self.begin, self.seconds = 0, 0.0, 0.0

    def end_step(self):
        self.steps += 1
        if self.steps in (FROM, STEPS - 1):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.begin, self.seconds = now, (now - self.begin) / (STEPS - 1 - FROM)


def loader(load):
    return DataLoader(Slow(load), 4, num_workers=1, prefetch_factor=2)


def with_lightning(load, waits):
    import lightning as L

    from lightning_hetero import HeteroDDPStrategy
    from tests.helpers import trainer_of

    wall = Wall()

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            loss = self.net(batch)
            if waits:
                self.log("loss", loss.detach(), on_step=True, on_epoch=False, sync_dist=True)
            return loss

        def on_train_batch_end(self, *args):
            wall.end_step()

        def configure_optimizers(self):
            return Update(self.parameters(), lr=1e-3)

    strategy = HeteroDDPStrategy(replan=8, local_batch_sizes=[4], process_group_backend="nccl")
    trainer_of(strategy, 1, accelerator="gpu", max_epochs=1).fit(Module(), loader(load))
    return strategy.observations(), wall.seconds


def with_accelerate(load, waits):
    from lightning_hetero.accelerate import HeteroAccelerator, HeteroPlugin

    accelerator, wall = HeteroAccelerator(hetero_plugin=HeteroPlugin(replan=8, local_batch_sizes=[4])), Wall()
    net, net_optimizer, batches = accelerator.prepare(net := Net(), Update(net.parameters(), lr=1e-3), loader(load))
    for batch in batches:
        loss = net(batch)
        if waits:
            accelerator.wait_for_everyone()
            accelerator.reduce(loss.detach())
        accelerator.backward(loss)
        net_optimizer.step()
        net_optimizer.zero_grad()
        wall.end_step()
    found = accelerator.observations()
    accelerator.end_training()
    return found, wall.seconds


def _measure(rank, loop):
    import numpy as np

    found = {}
    for load in LOADS:
        for waits in (False, True):
            observations, true = {"Lightning": with_lightning, "Accelerate": with_accelerate}[loop](load, waits)
            parts = {name: float(np.nanmedian(getattr(observations, name))) for name in FIELDS}
            found[f"{1e3 * load:.0f} ms a batch{', a barrier' if waits else ''}"] = {**parts, "true step": true}
    return found


def gpu():
    figures, wrong = {}, []
    for loop in ("Lightning", "Accelerate"):
        (cases,) = ranks(_measure, 1, loop, timeout=80)
        for name, parts in cases.items():
            total, true = sum(parts[field] for field in FIELDS), parts["true step"]
            figures[f"{loop}, {name}: a + P over the step"] = total / true
            figures[f"{loop}, {name}"] = parts
            if abs(total / true - 1) > 0.03:
                wrong.append(f"{loop}, {name}: a + P is {total / true:.3f} of the step")
            for field, known in (("backward", BACKWARD), ("optimizer", UPDATE)):
                if abs(parts[field] - known) > 0.05 * known + 5e-4:
                    wrong.append(f"{loop}, {name}: {field} {1e3 * parts[field]:.1f} ms for {1e3 * known:.0f}")
    require(not wrong, "; ".join(wrong), figures)
    return figures


def stand_in():
    """The same cases and more on a device of counted time."""
    return pytest_passes(["tests/test_device_times.py", "-k", "fabric or Fabric"])
