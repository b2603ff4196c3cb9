"""Collection of norms on a device that cannot be read: whatever would wait for it, or copy it to the host, is an error.

Tensors on torch's ``meta`` device have a shape and no values. All that a step does goes there as on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.callbacks.noise_sources import INTERVAL, source_of
from lightning_hetero.comm import noise
from lightning_hetero.comm.clock import HostClock
from lightning_hetero.comm.gradient_hook import HookState, gradient_hook
from lightning_hetero.comm.noise import NoiseCollector
from lightning_hetero.comm.observer import StepObserver
from lightning_hetero.optim import AdamPreconditioner

SHAPES = [(40, 30), (30,), (7,)]


def parameters():
    made = [torch.nn.Parameter(torch.zeros(shape, device="meta")) for shape in SHAPES]
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


def adam_of(weights):
    adam = torch.optim.Adam(weights)
    for p in weights:
        adam.state[p] = {"step": torch.tensor(20.0), "exp_avg_sq": torch.zeros_like(p)}
    return AdamPreconditioner([adam])


class Bucket(SimpleNamespace):
    """What DDP hands to a hook."""

    def buffer(self):
        return torch.cat([p.grad.flatten() for p in self.weights])

    def parameters(self):
        return self.weights

    def is_last(self):
        return True


def at_once(state, bucket):
    """An average that is there at once."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("adam", [False, True], ids=["plain", "as Adam scales it"])
@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "two micro-batches"])
def test_no_step_of_an_interval_reads_the_device(micro, adam, monkeypatch):
    """More steps than norms may wait, so that they are added up in between; only the message reads them."""
    monkeypatch.setattr(noise, "HELD", 12)
    weights = parameters()
    hook = HookState(StepObserver(HostClock()), 2, inner=at_once)
    hook.norms.preconditioner = adam_of(weights) if adam else None
    hook.norms.loss_scale = lambda: torch.ones((), device="meta")
    collector = NoiseCollector(hook, 0)
    collector.accumulate(lambda: micro, lambda: weights)
    collector.number = 20  # Adam's second moments are known
    for _ in range(20):
        for number in range(micro):
            collector.begin_step((9, 3))
            if number + 1 < micro:
                collector.after_backward()
        gradient_hook(hook, Bucket(weights=weights)).wait()
        collector.end_step()
    assert collector.sums.steps == 20
    with pytest.raises(RuntimeError, match="meta tensor"):
        collector.sums.peek()


@pytest.mark.parametrize("window", [1, 2], ids=["successive steps", "accumulation"])
def test_no_step_of_one_worker_reads_the_device(window):
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    trainer = SimpleNamespace(
        world_size=1,
        strategy=None,
        optimizers=[optimizer],
        accumulate_grad_batches=window,
        lightning_module=SimpleNamespace(automatic_optimization=True),
        precision_plugin=None,
    )
    source = source_of(trainer, method="pooled", every_n_steps=1, horizon=1e9)

    def step():
        for number in range(window):
            source.begin(trainer, 4)
            source.backward(trainer)
            if number + 1 == window:
                source.before_step(optimizer)
            source.end(trainer)

    first = 1 if window == 1 else 0  # which has nothing to compare with
    for _ in range(INTERVAL - 1 + first):
        step()
    with pytest.raises(RuntimeError, match="meta tensor"):
        step()
