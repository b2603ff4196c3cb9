"""Squared norms for the noise scale: taken without reading the device, and shared by the ranks of a resumed run.

That estimates are those of the gradients, also after a resume: tests/decisions/test_noise_scale.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_hetero.callbacks._gns.base import INTERVAL
from lightning_hetero.callbacks._gns.sources import source_of
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.noise.window_sums import WindowSums, own_part
from lightning_hetero.comm.noise.workers_noise import WorkersNoise
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.optim import AdamPreconditioner


def parameters():
    """On torch's meta device, whatever would wait for values is an error."""
    made = [torch.nn.Parameter(torch.zeros(shape, device="meta")) for shape in ((40, 30), (30,), (7,))]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


class Bucket(SimpleNamespace):
    """What DDP hands to a hook: all gradients."""

    def buffer(self):
        return torch.cat([p.grad.flatten() for p in self.weights])

    def parameters(self):
        return self.weights

    def is_last(self):
        return True

    def index(self):
        return 0


def averaged(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def adam_of(weights):
    adam = torch.optim.Adam(weights)
    for p in weights:
        adam.state[p] = {"step": torch.tensor(20.0), "exp_avg_sq": torch.zeros_like(p)}
    return AdamPreconditioner([adam])


@pytest.mark.parametrize(("micro", "adam"), [(1, False), (2, False), (2, True)])
def test_no_step_of_an_interval_reads_the_device(micro, adam, monkeypatch):
    """More steps than norms may wait."""
    monkeypatch.setattr(WindowSums, "max_waiting", 12)
    weights, hook = parameters(), HookState(StepTimer(HostClock()), 2)
    hook.use_hook(averaged)
    noise = WorkersNoise(hook, ControlPlane(0, 1))
    noise.precondition(adam_of(weights) if adam else None)
    noise.scaled_by(SimpleNamespace(_get_scale_async=lambda: torch.ones((), device="meta")))
    collector = noise.collector
    collector.accumulate(lambda: micro, lambda: weights)
    collector.resume(20, [0.0] * 5)  # Adam's second moments are known
    for _ in range(20):
        for number in range(micro):
            collector.begin_step((9, 3))
            if number + 1 < micro:
                collector.after_backward()
        gradient_hook(hook, Bucket(weights=weights)).wait()
        collector.end_step()
    assert collector.sums.steps == 20
    with pytest.raises(RuntimeError, match="meta tensor"):
        collector.sums.pack()


# a resume with other ranks


def test_a_cut_interval_goes_on_with_any_number_of_ranks():
    parts = [[6.0, 2.0, 3.0, 18.0, 3.0], [2.0, 4.0, 3.0, 18.0, 3.0]]
    for world_size in (1, 2, 3):
        shared = [own_part(parts, rank, world_size) for rank in range(world_size)]
        np.testing.assert_allclose(np.sum(shared, axis=0)[:2], np.sum(parts, axis=0)[:2])
        assert all(part[2:] == parts[0][2:] for part in shared)


# one worker


class Alone:
    """One worker, of which only the order of what happens counts."""

    def __init__(self, window):
        self.weight = torch.nn.Parameter(torch.zeros(3, device="meta"))
        self.weight.grad = torch.zeros_like(self.weight)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.trainer = SimpleNamespace(
            world_size=1, strategy=None, optimizers=[self.optimizer], accumulate_grad_batches=window,
            lightning_module=SimpleNamespace(automatic_optimization=True), precision_plugin=None,
        )  # fmt: skip
        self.source = source_of(self.trainer, method="pooled", every_n_steps=1, horizon=1e9)

    def step(self):
        for number in range(self.trainer.accumulate_grad_batches):
            self.source.begin(self.trainer, 4)
            self.source.backward(self.trainer)
            if number + 1 == self.trainer.accumulate_grad_batches:
                self.source.before_step(self.optimizer)
            self.source.end(self.trainer)


@pytest.mark.parametrize("window", [1, 2], ids=["successive steps", "accumulation"])
def test_no_step_of_one_worker_reads_the_device(window):
    alone = Alone(window)
    for _ in range(INTERVAL - 1 + (window == 1)):  # the first step has nothing to compare with
        alone.step()
    with pytest.raises(RuntimeError, match="meta tensor"):
        alone.step()
