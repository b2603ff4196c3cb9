"""Collection of norms on a device that cannot be read: whatever would wait for it, or copy it to the host, is an error.

Tensors on torch's ``meta`` device have a shape and no values. All that a step does goes there as on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.callbacks._gns.base import INTERVAL
from lightning_hetero.callbacks._gns.sources import source_of
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.noise import window_sums
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer
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

    def index(self):
        return 0


def at_once(state, bucket):
    """An average that is there at once."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("adam", [False, True], ids=["plain", "as Adam scales it"])
@pytest.mark.parametrize("micro", [1, 2], ids=["one batch", "two micro-batches"])
def test_no_step_of_an_interval_reads_the_device(micro, adam, monkeypatch):
    """More steps than norms may wait, so that they are added up in between; only the message reads them."""
    monkeypatch.setattr(window_sums.WindowSums, "max_waiting", 12)
    weights = parameters()
    hook = HookState(StepTimer(HostClock()), 2)
    hook.use_hook(at_once)
    hook.squares.norms.precondition(adam_of(weights) if adam else None)
    hook.squares.norms.scaled_by(lambda: torch.ones((), device="meta"))
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
        collector.sums.pack()


def test_between_the_steps_that_are_observed_no_norms_are_taken():
    weights = parameters()
    hook = HookState(StepTimer(HostClock()), 2)
    hook.use_hook(at_once)
    collector, taken = NoiseCollector(hook, 0, every_n_steps=3), []
    for _ in range(7):
        collector.begin_step((9, 3))
        gradient_hook(hook, Bucket(weights=weights)).wait()
        taken.append((len(hook.squares.local), len(hook.squares.averaged)))
        collector.end_step()
    assert taken == [(1, 1), (0, 0), (0, 0)] * 2 + [(1, 1)]
    assert collector.sums.steps == 3


class Alone:
    """One worker whose gradients are those of the weights, step by step."""

    def __init__(self, weights, window=1, every_n_steps=1, automatic=True):
        self.optimizer = torch.optim.SGD(weights, lr=0.1)
        self.trainer = SimpleNamespace(
            world_size=1,
            strategy=None,
            optimizers=[self.optimizer],
            accumulate_grad_batches=window,
            lightning_module=SimpleNamespace(automatic_optimization=automatic),
            precision_plugin=None,
        )
        self.source = source_of(self.trainer, method="pooled", every_n_steps=every_n_steps, horizon=1e9)

    def step(self, size=4):
        window = self.trainer.accumulate_grad_batches
        for number in range(window):
            self.source.begin(self.trainer, size)
            self.source.backward(self.trainer)
            if number + 1 == window:
                self.source.before_step(self.optimizer)
            self.source.end(self.trainer)


@pytest.mark.parametrize("window", [1, 2], ids=["successive steps", "accumulation"])
def test_no_step_of_one_worker_reads_the_device(window):
    alone = Alone(parameters(), window)
    first = 1 if window == 1 else 0  # which has nothing to compare with
    for _ in range(INTERVAL - 1 + first):
        alone.step()
    with pytest.raises(RuntimeError, match="meta tensor"):
        alone.step()


def test_successive_steps_are_compared_where_their_batches_are_of_one_size():
    alone, compared = Alone(parameters()), []
    for size in (4, 4, 2, 4, 4, 4):
        alone.step(size)
        compared.append(alone.source.pairs.steps)
    assert compared == [0, 1, 1, 1, 2, 3]


def test_gradients_are_kept_for_the_step_that_is_observed_alone():
    alone, kept = Alone(parameters(), every_n_steps=3), []
    for _ in range(7):
        alone.step()
        kept.append((len(alone.source.previous), alone.source.pairs.steps))
    assert kept == [(0, 0), (0, 0), (1, 0), (0, 1), (0, 1), (1, 1), (0, 2)]


def test_accumulation_by_hand_is_known_from_the_first_step_on():
    alone, observed = Alone(parameters(), window=2, automatic=False), []
    for _ in range(3):
        alone.step()
        observed.append((alone.source.windows.steps, alone.source.pairs.steps))
    assert observed == [(0, 0), (1, 0), (2, 0)]


def test_a_window_without_a_loss_is_not_part_of_the_next_one():
    alone = Alone(parameters(), window=2)
    for _ in range(2):
        alone.source.begin(alone.trainer, 4)
        alone.source.end(alone.trainer)  # training_step gave no loss
    alone.step()
    assert alone.source.windows.steps == 1


@pytest.mark.parametrize("window", [1, 2], ids=["successive steps", "accumulation"])
def test_what_one_worker_has_seen_since_the_last_reading_goes_through_a_checkpoint(window):
    weight = torch.nn.Parameter(torch.zeros(3))
    alone, resumed = (Alone([weight], window) for _ in range(2))
    for number in range(4):
        weight.grad = torch.arange(3.0) + number
        alone.step()
    resumed.source.resume(alone.source.interval())
    assert resumed.source.number == 4
    for source in (alone.source, resumed.source):
        source.flush()
    assert resumed.source.running == alone.source.running
    assert resumed.source.running.samples > 0
